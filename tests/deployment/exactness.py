"""Questions whose answer is known to the token: what HF transformers says is what a deployment's stream must show.

How text shows ids: with `continuous_usage_stats` every chunk says how many tokens its text comes from, and in a
byte-level vocabulary two tokens never have the same bytes. So the text behind each token tells the token; all but the
special ones, which have no text. Those the prefix cache tells, which compares tokens: see `continued`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import msgspec
import openai
from openai.types import CompletionUsage
from tokenizers import Tokenizer

from runner.store.store import resolve

MODEL = "smollm2-135m-instruct"
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
REFERENCES = Path(__file__).parents[1] / "references" / "greedy.json"
CLIENT_S = 240.0


class Reference(msgspec.Struct, frozen=True):
    """A prompt and the tokens that follow it, at most 64."""

    name: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@cache
def references() -> tuple[Reference, ...]:
    """The 20 greedy ones of tests/references/make_references.py."""
    return tuple(msgspec.convert(json.loads(REFERENCES.read_text())["prompts"], list[Reference]))


def named(*names: str) -> list[Reference]:
    by_name = {reference.name: reference for reference in references()}
    return [by_name[name] for name in names]


def up_to(num_tokens: int) -> list[Reference]:
    """Those with prompts of at most so many tokens."""
    return [reference for reference in references() if len(reference.prompt_token_ids) <= num_tokens]


def continued(reference: Reference, count: int) -> Reference:
    """The prompt with the first `count` tokens of its answer. Prefix hits on it prove that they were these very ids."""
    output = reference.output_token_ids
    return Reference(f"{reference.name}+{count}", reference.prompt_token_ids + output[:count], output[count:])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{resolve(MODEL).folder}/tokenizer.json")


def text_of(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=True))


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=CLIENT_S)


async def ask_exactly(
    api: openai.AsyncOpenAI,
    reference: Reference,
    num_tokens: int = 64,
    *,
    request_id: str | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
    sampling: dict[str, Any] = GREEDY,
    priority: int = 0,
) -> CompletionUsage:
    """Raises AssertionError at the first chunk whose text is not that of the reference's tokens."""
    expected = reference.output_token_ids[:num_tokens]
    stream_options: Any = {"include_usage": True, "continuous_usage_stats": True}  # the second is unknown to OpenAI
    extra = {"ignore_eos": True, **sampling}
    if priority:
        extra["priority"] = priority
    if kv_transfer_params is not None:
        extra["kv_transfer_params"] = kv_transfer_params
    stream = await api.completions.create(
        model=MODEL,
        prompt=reference.prompt_token_ids,
        max_tokens=len(expected),
        stream=True,
        stream_options=stream_options,
        extra_body=extra,
        extra_headers={"X-Request-ID": request_id} if request_id else None,
    )
    text, reasons = "", list[str]()
    usage: CompletionUsage | None = None
    async for chunk in stream:
        usage = chunk.usage
        assert usage is not None
        if chunk.choices:
            text += chunk.choices[0].text
            if chunk.choices[0].finish_reason:
                reasons.append(chunk.choices[0].finish_reason)
            # Half a character is held back until the rest of it is there.
            right = text_of(expected[: usage.completion_tokens])
            assert text in (right, right.rstrip("\ufffd")), (reference.name, usage.completion_tokens, text, right)
    assert text == text_of(expected), reference.name
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(reference.prompt_token_ids), len(expected))
    assert reasons == ["length"], reference.name
    return usage


async def ask_all_exactly(
    url: str,
    asked: Sequence[Reference],
    num_tokens: int = 64,
    *,
    concurrency: int = 16,
    id_prefix: str = "",
    sampling: dict[str, Any] = GREEDY,
    priorities: int = 1,
) -> None:
    """All of them, `concurrency` at a time, with 0, 1, … `priorities` - 1 in turn as their priorities.

    With `id_prefix` a request's id is that and its name.
    """
    limit = anyio.CapacityLimiter(concurrency)

    async with client(url) as api, anyio.create_task_group() as tasks:

        async def one(reference: Reference, priority: int) -> None:
            async with limit:
                request_id = f"{id_prefix}{reference.name}" if id_prefix else None
                await ask_exactly(
                    api, reference, num_tokens, request_id=request_id, sampling=sampling, priority=priority
                )

        for place, reference in enumerate(asked):
            tasks.start_soon(one, reference, place % priorities)


def num_cached(usage: CompletionUsage) -> int:
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    return usage.prompt_tokens_details.cached_tokens
