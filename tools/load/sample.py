"""What is known of one request after it has ended: the times of its chunks, its usage, or why it failed. Pure.

A chunk is what one event of the stream carried, at least one token; tokens are counted by the server's usage alone.
Times are seconds on the client's monotonic clock.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """`failure` is None for a good answer; the times of a failed one count nowhere."""

    began: float  # the request was made; it may wait for a connection
    sent: float  # it had its connection
    ended: float
    chunks: tuple[float, ...] = ()  # arrival of each chunk that carried text
    last: float = 0.0  # arrival of the last event with a choice: the last token is out, be it one without text
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None

    @property
    def connection_wait(self) -> float:
        return self.sent - self.began

    @property
    def time_to_first_token(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def time_between_tokens(self) -> float | None:
        """Mean over the request; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.last - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def times_between_chunks(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def end_to_end(self) -> float:
        return self.ended - self.sent


class StreamReader:
    """Reads the events of one `/v1/completions` stream as they come. Feed it bytes with their arrival time."""

    def __init__(self, expected_tokens: int) -> None:
        self.chunks: list[float] = []
        self.last = 0.0
        self.prompt_tokens = self.output_tokens = 0
        self._expected = expected_tokens
        self._rest = b""
        self._done = self._counted = False
        self._error: str | None = None

    def feed(self, data: bytes, now: float) -> None:
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            body: Any = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._error = self._error or "an event of the stream is no JSON"
            return
        if not isinstance(body, dict):
            return
        if "error" in body:
            self._error = self._error or f"error event: {error_text(body)}"
        if isinstance(usage := body.get("usage"), dict):
            self.prompt_tokens = usage.get("prompt_tokens", 0)
            self.output_tokens, self._counted = usage.get("completion_tokens", 0), True
        if choices := body.get("choices"):
            self.last = now
            if any(choice.get("text") for choice in choices):
                self.chunks.append(now)

    def failure(self) -> str | None:
        """Why what has been read is no good answer."""
        if self._error is not None:
            return self._error
        if not self._done:
            return "the stream ended without [DONE]"
        if not self._counted:
            return "the stream carried no usage"
        if not self.chunks:
            return "the stream carried no text to time its first token by"
        if self.output_tokens != self._expected:
            return f"{self.output_tokens} tokens instead of {self._expected}"
        return None


def error_text(body: object) -> str:
    """The message in an OpenAI-shaped error."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or body)
