"""What the engine is asked for: each supported field, and every client of the field as it really sends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.messages.admission import SubmitRequest
from actors.messages.model import ModelDescription
from actors.messages.request import EngineRequest, SamplingParams
from tests.api.openai.scripted import MODEL, Script, Server, closings, events, one_by_one, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
NUM_HELLO = 31  # tokens of that conversation


async def asked(server: Server, path: str, body: dict[str, Any], **headers: str) -> EngineRequest:
    status, answer = await server.post(path, {"model": MODEL, **body}, **headers)
    assert status == 200, answer
    request: EngineRequest = server.admission.of(SubmitRequest)[-1].request
    return request


async def test_defaults(description: ModelDescription) -> None:
    async with serving(description, max_model_len=500) as server:
        chat = await asked(server, CHAT, HELLO)
        # OpenAI's defaults: temperature and top_p 1; a seed of the engine's own makes the draw repeatable in its log.
        assert chat.sampling == SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, seed=99)
        assert len(chat.prompt_token_ids) == NUM_HELLO
        assert chat.max_tokens == 500 - NUM_HELLO
        assert (chat.min_tokens, chat.priority, chat.eos_token_ids) == (0, 0, description.eos_token_ids)
        assert (chat.do_remote_decode, chat.ticket) == (False, None)
        assert (await asked(server, TEXT, {"prompt": "Hello"})).max_tokens == 16


async def test_supported_fields(description: ModelDescription) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": -(2**63),
        "max_tokens": 7,
        "min_tokens": 7,
        "ignore_eos": True,
        "priority": -3,
        "n": 1,
        "timeout": 5,
    }
    async with serving(description, policy="priority") as server:
        for path, body in ((CHAT, HELLO), (TEXT, {"prompt": "Hello"})):
            request = await asked(server, path, {**body, **fields})
            assert request.sampling == SamplingParams(0.5, 0.9, 40, -(2**63))
            assert (request.max_tokens, request.min_tokens, request.priority) == (7, 7, -3)
            assert request.eos_token_ids == ()
            assert request.deadline - request.arrival == pytest.approx(5)
            # The newer name wins; null is as good as absent; 0 and more than the vocabulary turn top_k off.
            request = await asked(server, path, {**body, "max_tokens": 7, "max_completion_tokens": 3, "top_k": 0})
            assert (request.max_tokens, request.sampling.top_k) == (3, -1)
            nulls = dict.fromkeys([*fields, "stop", "stream", "stream_options", "kv_transfer_params"])
            assert (await asked(server, path, {**body, **nulls})).sampling.temperature == 1.0
        # Greedy needs no seed.
        assert (await asked(server, CHAT, {**HELLO, "temperature": 0})).sampling == SamplingParams()


async def test_messages(description: ModelDescription, tokenizer: Any) -> None:
    async with serving(description) as server:
        request = await asked(
            server,
            CHAT,
            {
                "messages": [
                    {"role": "developer", "content": "Be brief.", "name": "me"},
                    {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
                    # What the openai package makes of an answer of ours, sent back.
                    {
                        "role": "assistant",
                        "content": "Hi",
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                        "function_call": None,
                        "tool_calls": None,
                    },
                    {"role": "assistant", "content": None, "tool_calls": []},
                    {"role": "tool", "content": "42", "tool_call_id": "1"},
                ]
            },
        )
    assert tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# clients.md, each with a plain value for its own fields.
CLIENTS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "aiperf": (
        CHAT,
        {**HELLO, **STREAM, "max_completion_tokens": 8, "ignore_eos": True},
        {"X-Request-ID": "a-1", "X-Correlation-ID": "b-2", "X-Session-Affinity": "c-3"},
    ),
    "guidellm": (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "max_completion_tokens": 8,
        },
        {},
    ),
    "vllm bench serve": (
        TEXT,
        {**STREAM, "prompt": "Hello", "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, "max_tokens": 8},
        {},
    ),
    "lm-eval": (TEXT, {"prompt": [[5, 6, 7]], "max_tokens": 1, "seed": 1234, "stop": ["\n\n", "Q:"]}, {}),
    "vllm-router": (
        CHAT,
        {
            **HELLO,
            "no_stop_trim": False,
            "ignore_eos": False,
            "continue_final_message": False,
            "skip_special_tokens": True,
            "separate_reasoning": True,
            "stream_reasoning": True,
            "include_reasoning": True,
            "return_hidden_states": False,
            "echo": False,
            "min_tokens": 1,
            "max_tokens": 8,
        },
        {},
    ),
    "openai": (
        CHAT,
        {
            **HELLO,
            "response_format": {"type": "text"},
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "store": True,
            "metadata": {"a": "b"},
            "user": "me",
            "service_tier": "auto",
            "reasoning_effort": None,
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "logprobs": False,
            "top_logprobs": 0,
            "max_tokens": 8,
        },
        {},
    ),
}


async def test_every_client_is_served(description: ModelDescription, tokenizer: Any) -> None:
    async with serving(description) as server:
        server.admission.script = Script(one_by_one(tokenizer, "One two three four five six seven eight nine"))
        for client, (path, body, headers) in CLIENTS.items():
            data = msgspec.json.encode({"model": MODEL, **body})
            async with server.http.post(server.url + path, data=data, headers=headers) as response:
                raw = await response.read()
                assert response.status == 200, (client, raw)
                if "X-Request-ID" in headers:
                    assert response.headers["X-Request-ID"] == headers["X-Request-ID"]
            answer = events(raw)[-2] if body.get("stream") else msgspec.json.decode(raw)
            assert answer["usage"]["completion_tokens"] == body.get("max_completion_tokens", body.get("max_tokens"))
        async with server.http.head(server.url + "/metrics") as response:
            assert response.status == 200


async def test_continuous_usage(description: ModelDescription) -> None:
    async with serving(description) as server:
        server.admission.script = Script(((5000,), (5001, 5002), (5003,)))
        body = {"model": MODEL, "prompt": [9, 9], "stream": True, "max_tokens": 4}
        for options, expected in (
            ({"continuous_usage_stats": True, "include_usage": True}, [1, 3, 4, 4, 4]),
            ({"continuous_usage_stats": True}, [1, 3, 4, 4]),
            ({"include_usage": True}, [None, None, None, None, 4]),
            ({}, ["absent"] * 4),
        ):
            data = msgspec.json.encode({**body, "stream_options": options})
            async with server.http.post(server.url + TEXT, data=data) as response:
                *chunks, done = events(await response.read())
            assert done == "[DONE]"
            usages = [chunk.get("usage", {"completion_tokens": "absent"}) for chunk in chunks]
            assert [usage and usage["completion_tokens"] for usage in usages] == expected


async def streamed(server: Server, body: dict[str, Any]) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens of a stream; a whole answer must agree."""
    request = {"model": MODEL, "prompt": [9], "max_tokens": 50, **body}
    data = msgspec.json.encode({**request, **STREAM})
    async with server.http.post(server.url + TEXT, data=data) as response:
        *chunks, last, usage, _ = events(await response.read())
    found = (
        "".join(chunk["choices"][0]["text"] for chunk in chunks),
        last["choices"][0]["finish_reason"],
        usage["usage"]["completion_tokens"],
    )
    _, whole = await server.post(TEXT, request)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]) == found
    return found


async def test_stop_strings(description: ModelDescription, tokenizer: Any) -> None:
    outputs = one_by_one(tokenizer, "One two three four five")
    assert [tokenizer.decode(output) for output in outputs] == ["One", " two", " three", " four", " five"]
    async with serving(description) as server:
        server.admission.script = Script(outputs)
        # Over a token border, ending in the middle of a token: the rest of that token is cut, its token counted.
        assert await streamed(server, {"stop": "o thr"}) == ("One tw", "stop", 3)
        assert await closings(server.admission, 2) == [("abort", "stop string"), ("closed", "stop")] * 2
        assert await streamed(server, {"stop": ["xyz", " f"]}) == ("One two three", "stop", 4)
        # It began and did not end: nothing is lost.
        assert await streamed(server, {"stop": ["five!"]}) == ("One two three four five", "stop", 6)
        assert await streamed(server, {"stop": ["four!"], "max_tokens": 4}) == ("One two three four", "length", 4)
        # Complete with the very last token: the engine has ended already, so nothing is aborted.
        server.admission.messages.clear()
        assert await streamed(server, {"stop": "four", "max_tokens": 4}) == ("One two three ", "stop", 4)
        assert await closings(server.admission, 2) == [("closed", "stop")] * 2
        # Tokens that came in the same output behind it are not kept.
        server.admission.script = Script((tuple(token for output in outputs for token in output),))
        assert await streamed(server, {"stop": "two"}) == ("One ", "stop", 2)


async def test_min_tokens_exempts_the_text_of_the_first_tokens(description: ModelDescription, tokenizer: Any) -> None:
    outputs = one_by_one(tokenizer, "One two One two One")
    async with serving(description) as server:
        server.admission.script = Script(outputs)
        assert await streamed(server, {"stop": "two"}) == ("One ", "stop", 2)
        assert await streamed(server, {"stop": "two", "min_tokens": 2}) == ("One two One ", "stop", 4)
        # It has to begin behind them, too: "two One" begins in the second token.
        assert await streamed(server, {"stop": "two One", "min_tokens": 2}) == ("One two One ", "stop", 5)
        assert await streamed(server, {"stop": "two", "min_tokens": 4}) == ("One two One two One", "stop", 6)


async def test_the_token_that_ends_the_text_is_counted_and_not_shown(description: ModelDescription) -> None:
    """Even where the tokenizer does not call it special: here an ordinary word ends the text."""
    async with serving(msgspec.structs.replace(description, eos_token_ids=(5000,))) as server:
        server.admission.script = Script(((5000,),))
        assert await streamed(server, {"ignore_eos": True, "max_tokens": 1}) == (" properly", "length", 1)
        server.admission.script = Script()
        assert await streamed(server, {}) == ("", "stop", 1)
