"""Clients of the fault tests: what each of them got, to the byte, and when.

A client keeps to three outcomes: a whole answer, an explicit error, or silence until its own patience ends; the last
one is an `AssertionError`. `expected` is what Hugging Face transformers says (tests/references/make_references.py).
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from runner.store.store import resolve

MODEL = "smollm2-135m-instruct"
REFERENCES = Path(__file__).parents[1] / "references" / "greedy.json"
# Beyond its deadline, for the answer to cross a loaded machine.
PATIENCE_S = 5.0
STATUS = {"engine_unavailable": 503, "aborted": 503, "deadline_exceeded": 504, "queue_full": 429}


@cache
def _references() -> dict[str, dict[str, list[int]]]:
    return {entry["name"]: entry for entry in json.loads(REFERENCES.read_text())["prompts"]}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{resolve(MODEL).folder}/tokenizer.json")


def prompt_of(name: str) -> list[int]:
    return _references()[name]["prompt_token_ids"]


def expected(name: str, num_tokens: int) -> str:
    """The text of the first `num_tokens` greedy tokens of a reference prompt, 64 at most; special ones are no text."""
    return str(tokenizer().decode(_references()[name]["output_token_ids"][:num_tokens], skip_special_tokens=True))


@dataclass
class Answer:
    """`error` is the error object of a body or of an event; `done`: a stream ended with [DONE]."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    retry_after: str | None = None
    seconds: float = 0.0
    broken: str | None = None  # the connection ended before the answer did
    events: list[dict[str, Any]] = field(default_factory=list)

    def must_be(self, text: str) -> None:
        assert (self.status, self.finish_reason, self.error, self.broken) == (200, "length", None, None), self
        assert self.text == text

    def must_be_right_or_an_error(self, text: str) -> None:
        """The whole right text, or an error that says so; an unfinished text is a beginning of the right one."""
        if self.error is None:
            self.must_be(text)
        else:
            self.must_be_an_error("engine_unavailable", text)

    def must_be_an_error(self, code: str, text: str) -> None:
        """`code` as the status of an unstarted answer, or as the last event of a stream that has begun with `text`."""
        assert self.error is not None, self
        assert self.error["code"] == code, self
        assert self.error["message"], self
        assert self.status == (200 if self.text else STATUS[code]), self
        assert (self.finish_reason, self.done, self.broken) == (None, False, None), self
        assert text.startswith(self.text), self


@dataclass(frozen=True)
class Question:
    """A greedy request for exactly `max_tokens` tokens. `timeout` is its deadline, in seconds."""

    prompt: list[int]
    max_tokens: int = 16
    stream: bool = False
    timeout: float = 60.0
    request_id: str = ""

    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
            "timeout": self.timeout,
        }


def ask(url: str, question: Question, heard: Callable[[], None] = lambda: None) -> Answer:
    """`heard` is called at every event of a stream. Raises AssertionError for silence beyond the deadline."""
    started = time.monotonic()
    patience = question.timeout + PATIENCE_S
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=patience)
    headers = {"Content-Type": "application/json"}
    if question.request_id:
        headers["X-Request-ID"] = question.request_id
    answer = Answer(0)
    try:
        connection.request("POST", "/v1/completions", json.dumps(question.body()), headers)
        response = connection.getresponse()
        answer.status, answer.retry_after = response.status, response.getheader("Retry-After")
        if response.getheader("Content-Type", "").startswith("text/event-stream"):
            _read_events(response, answer, heard)
        else:
            _take(answer, json.loads(response.read()))
    except TimeoutError as error:
        raise AssertionError(f"silence for {patience:g} s: {answer}") from error
    except (OSError, http.client.HTTPException) as error:
        answer.broken = repr(error)
    finally:
        connection.close()
        answer.seconds = time.monotonic() - started
    assert answer.seconds < patience, answer
    return answer


def _read_events(response: http.client.HTTPResponse, answer: Answer, heard: Callable[[], None]) -> None:
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            answer.done = True
        elif data:
            assert not answer.done, f"after [DONE]: {line!r}"
            assert answer.error is None, f"after the error event: {line!r}"
            _take(answer, json.loads(data))
            heard()
    if not answer.done and answer.error is None:
        answer.broken = "the stream ended without [DONE]"


def _take(answer: Answer, message: dict[str, Any]) -> None:
    answer.events.append(message)
    if "error" in message:
        answer.error = message["error"]
    for choice in message.get("choices", ()):
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def in_background(url: str, question: Question, heard: Callable[[], None] = lambda: None) -> Future[Answer]:
    """The client goes its own way; `result()` gives its answer or raises what went wrong."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(ask(url, question, heard))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class Departing:
    """A client that sends its question and goes when it is told to, without reading the answer."""

    def __init__(self, url: str, question: Question) -> None:
        address = urlsplit(url)
        body = json.dumps(question.body()).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"X-Request-ID: {question.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket = socket.create_connection((str(address.hostname), int(address.port or 80)), timeout=10.0)
        self._socket.sendall(head.encode() + body)

    def leave(self) -> None:
        self._socket.close()
