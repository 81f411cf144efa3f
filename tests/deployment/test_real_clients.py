"""Clients that people use, against `kvyard up` as it comes but in float32: the `openai` package and curl.

The answers are those of HF transformers in float32, greedy, with the chat template's default system prompt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.deployment.exactness import MODEL, named, text_of
from tests.deployment.harness import Deployment

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
NUM_PROMPT, NUM_ANSWER = 37, 8  # tokens, the end-of-text token among them
FOLLOW_UP: list[ChatCompletionMessageParam] = [
    *QUESTION,
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]
FOLLOW_UP_ANSWER = "Rome."
# The same question without a system prompt, as text; its 16 tokens are a prompt of the references.
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment("--dtype=float32") as running:
        yield running
        assert running.metric("decode-0", "kvyard_kv_loads_total", outcome="landed") > 0
        assert running.metric("decode-0", "kvyard_kv_loads_total", outcome="recomputed") == 0
        running.wait_quiet()


@pytest.fixture
def base_url(deployment: Deployment) -> str:
    return f"{deployment.url}/v1"


def test_openai_sync(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == [MODEL]
        answer = api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (NUM_PROMPT, NUM_ANSWER)

        with api.chat.completions.create(model=MODEL, messages=FOLLOW_UP, temperature=0, stream=True) as stream:
            pieces = [chunk.choices[0].delta.content for chunk in stream]
        assert "".join(piece or "" for piece in pieces) == FOLLOW_UP_ANSWER
        assert len([piece for piece in pieces if piece]) == 2  # "Rome" and "."

        text = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
        (reference,) = named("chat-0")
        assert text.choices[0].text == text_of(reference.output_token_ids[:6])
        assert text.choices[0].finish_reason == "length"


async def test_openai_async(base_url: str) -> None:
    """Everything at once, on one client."""
    (reference,) = named("chat-0")
    got: dict[str, Any] = {}
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as api:

        async def whole() -> None:
            answer = await api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
            got["whole"] = answer.choices[0].message.content

        async def streamed() -> None:
            stream = await api.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            got["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage is not None
            got["usage"] = (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)

        async def completed() -> None:
            stream = await api.completions.create(
                model=MODEL, prompt=reference.prompt_token_ids, max_tokens=6, temperature=0, stream=True
            )
            got["completed"] = "".join([chunk.choices[0].text async for chunk in stream])

        async def stopped() -> None:
            answer = await api.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, stop=[" France"], max_completion_tokens=20
            )
            got["stopped"] = (answer.choices[0].message.content, answer.choices[0].finish_reason)

        async def refused() -> None:
            with pytest.raises(openai.NotFoundError, match="gpt-4"):
                await api.chat.completions.create(model="gpt-4", messages=QUESTION)

        async with anyio.create_task_group() as tasks:
            for client in (whole, streamed, completed, stopped, refused):
                tasks.start_soon(client)
    assert got == {
        "whole": ANSWER,
        "streamed": ANSWER,
        "usage": (NUM_PROMPT, NUM_ANSWER),
        "completed": text_of(reference.output_token_ids[:6]),
        "stopped": ("The capital of", "stop"),
    }


def curl(*arguments: str) -> bytes:
    program = shutil.which("curl")
    assert program is not None, "curl is not installed; this test shows the command of the README with it"
    done = subprocess.run([program, "--silent", "--show-error", *arguments], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_curl(base_url: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    ask = ("-H", "Content-Type: application/json", f"{base_url}/chat/completions", "-d")
    answer = json.loads(curl(*ask, json.dumps(body)))
    assert answer["choices"][0]["message"]["content"] == ANSWER

    lines = curl("--no-buffer", *ask, json.dumps(body | {"stream": True})).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER

    # From a client that is not a program: no header that says JSON, and a body that is none.
    error = json.loads(curl(f"{base_url}/chat/completions", "-d", "hello"))["error"]
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]
