"""Every kind of bad input: its status, code and the field it names; and that the engine never heard of it."""

from __future__ import annotations

from typing import Any

from actors.messages.admission import SubmitRequest
from actors.messages.errors import RefusalReason, RequestRefused
from actors.messages.model import ModelDescription
from tests.api.openai.scripted import MODEL, Script, Server, serving

USER = {"role": "user", "content": "Hello"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": [USER], **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": MODEL, "prompt": "Hello", **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[USER, fields])


def raw(body: bytes) -> tuple[str, bytes]:
    return CHAT, body


def without(name: str, request: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return request[0], {key: value for key, value in request[1].items() if key != name}


INVALID = {
    # Malformed bodies.
    "no json": (raw(b'{"model": '), "invalid_json", None),
    "trailing": (raw(b"{} {}"), "invalid_json", None),
    "empty": (raw(b""), "invalid_json", None),
    "not an object": (raw(b"[1]"), "invalid_json", None),
    "no utf-8": (raw(b'{"model": "\xff\xfe"}'), "invalid_json", None),
    "half a surrogate pair": (raw(b'{"model": "\\ud83d"}'), "invalid_json", None),
    "too deep": (raw(b'{"messages": ' + b"[" * 100_000), "invalid_json", None),
    "deep and closed": (raw(b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "invalid_json", None),
    "not a number": (raw(b'{"temperature": NaN}'), "invalid_json", None),
    "number too large": (raw(b'{"temperature": 1e999}'), "invalid_json", None),
    "integer too large": (raw(b'{"seed": ' + b"9" * 5000 + b"}"), "invalid_json", None),
    # Missing fields.
    "no model": (without("model", chat()), "missing_required_parameter", "model"),
    "no messages": (without("messages", chat()), "missing_required_parameter", "messages"),
    "no prompt": (without("prompt", text()), "missing_required_parameter", "prompt"),
    "prompt to chat": (chat(prompt="x"), "unknown_parameter", "prompt"),
    "messages to completions": (text(messages=[USER]), "unknown_parameter", "messages"),
    # Wrong types.
    "model number": (chat(model=1), "invalid_type", "model"),
    "messages text": (chat(messages="x"), "invalid_type", "messages"),
    "message text": (chat(messages=["x"]), "invalid_type", "messages[0]"),
    "stream text": (chat(stream="true"), "invalid_type", "stream"),
    "stream number": (chat(stream=1), "invalid_type", "stream"),
    "max_tokens bool": (chat(max_tokens=True), "invalid_type", "max_tokens"),
    "max_tokens float": (chat(max_tokens=1.0), "invalid_type", "max_tokens"),
    "max_tokens text": (chat(max_tokens="1"), "invalid_type", "max_tokens"),
    "temperature bool": (chat(temperature=True), "invalid_type", "temperature"),
    "temperature text": (chat(temperature="1"), "invalid_type", "temperature"),
    "seed float": (chat(seed=0.5), "invalid_type", "seed"),
    "stop number": (chat(stop=1), "invalid_type", "stop"),
    "stop of numbers": (chat(stop=["a", 1]), "invalid_type", "stop[1]"),
    "ignore_eos number": (chat(ignore_eos=0), "invalid_type", "ignore_eos"),
    "stream_options text": (chat(stream_options="x"), "invalid_type", "stream_options"),
    "include_usage number": (chat(stream_options={"include_usage": 1}), "invalid_type", "stream_options.include_usage"),
    "stream option": (chat(stream_options={"x": 1}), "unknown_parameter", "stream_options.x"),
    "prompt number": (text(prompt=1), "invalid_type", "prompt"),
    "prompt mixed": (text(prompt=[1, "a"]), "invalid_type", "prompt"),
    "prompt bools": (text(prompt=[True, False]), "invalid_type", "prompt"),
    "prompt floats": (text(prompt=[1.0]), "invalid_type", "prompt"),
    "prompt nested": (text(prompt=[[[1]]]), "invalid_type", "prompt"),
    # Out of range.
    "temperature low": (chat(temperature=-0.1), "invalid_value", "temperature"),
    "temperature high": (chat(temperature=2.1), "invalid_value", "temperature"),
    "top_p zero": (chat(top_p=0), "invalid_value", "top_p"),
    "top_p high": (chat(top_p=1.01), "invalid_value", "top_p"),
    "top_k low": (chat(top_k=-2), "invalid_value", "top_k"),
    "n two": (chat(n=2), "invalid_value", "n"),
    "n zero": (chat(n=0), "invalid_value", "n"),
    "max_tokens zero": (chat(max_tokens=0), "invalid_value", "max_tokens"),
    "max_completion_tokens zero": (chat(max_completion_tokens=0), "invalid_value", "max_completion_tokens"),
    "min_tokens low": (chat(min_tokens=-1), "invalid_value", "min_tokens"),
    "min_tokens high": (chat(min_tokens=6, max_tokens=5), "invalid_value", "min_tokens"),
    "min_tokens over 16": (text(min_tokens=17), "invalid_value", "min_tokens"),
    "seed high": (chat(seed=2**63), "invalid_value", "seed"),
    "timeout zero": (chat(timeout=0), "invalid_value", "timeout"),
    "stop empty": (chat(stop=""), "invalid_value", "stop"),
    "stop has empty": (chat(stop=["a", ""]), "invalid_value", "stop[1]"),
    "stop too many": (chat(stop=["a"] * 17), "invalid_value", "stop"),
    "stop too long": (chat(stop="a" * 1025), "invalid_value", "stop"),
    "priority": (chat(priority=1), "invalid_value", "priority"),
    # Prompts.
    "messages empty": (chat(messages=[]), "invalid_value", "messages"),
    "prompt empty": (text(prompt=""), "invalid_value", "prompt"),
    "prompt no ids": (text(prompt=[]), "invalid_value", "prompt"),
    "prompt one empty": (text(prompt=[[]]), "invalid_value", "prompt"),
    "two prompts": (text(prompt=["a", "b"]), "invalid_value", "prompt"),
    "two id prompts": (text(prompt=[[1], [2]]), "invalid_value", "prompt"),
    "id too large": (text(prompt=[1, 49_152]), "invalid_value", "prompt"),
    "id far too large": (text(prompt=[10**30]), "invalid_value", "prompt"),
    "id negative": (text(prompt=[-1, 5]), "invalid_value", "prompt"),
    # Messages.
    "no role": (message(content="x"), "missing_required_parameter", "messages[1].role"),
    "no content": (message(role="user"), "missing_required_parameter", "messages[1].content"),
    "null content": (message(role="user", content=None), "missing_required_parameter", "messages[1].content"),
    "unknown role": (message(role="robot", content="x"), "invalid_value", "messages[1].role"),
    "role number": (message(role=1, content="x"), "invalid_value", "messages[1].role"),
    "role list": (message(role=[], content="x"), "invalid_value", "messages[1].role"),
    "content number": (message(role="user", content=1), "invalid_type", "messages[1].content"),
    "part text": (message(role="user", content=["x"]), "invalid_type", "messages[1].content[0]"),
    "part image": (
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "unsupported_value",
        "messages[1].content[0].type",
    ),
    "part without text": (
        message(role="user", content=[{"type": "text"}]),
        "invalid_type",
        "messages[1].content[0].text",
    ),
    "part field": (
        message(role="user", content=[{"type": "text", "text": "x", "y": 1}]),
        "unknown_parameter",
        "messages[1].content[0].y",
    ),
    "message field": (message(role="user", content="x", y=1), "unknown_parameter", "messages[1].y"),
    "tool calls": (
        message(role="assistant", content="x", tool_calls=[{"id": "1"}]),
        "unsupported_parameter",
        "messages[1].tool_calls",
    ),
    # Fields unknown, or not supported yet.
    "unknown": (chat(temprature=1), "unknown_parameter", "temprature"),
    "tools": (chat(tools=[{"type": "function"}]), "unsupported_parameter", "tools"),
    "a named tool": (chat(tool_choice={"type": "function"}), "unsupported_parameter", "tool_choice"),
    "logprobs": (chat(logprobs=True), "unsupported_parameter", "logprobs"),
    "logprobs of text": (text(logprobs=1), "unsupported_parameter", "logprobs"),
    "echo": (text(echo=True, logprobs=1), "unsupported_parameter", "echo"),
    "penalty": (chat(frequency_penalty=0.5), "unsupported_parameter", "frequency_penalty"),
    "penalty bool": (chat(repetition_penalty=True), "unsupported_parameter", "repetition_penalty"),
    "logit_bias": (chat(logit_bias={"1": 5}), "unsupported_parameter", "logit_bias"),
    "json": (chat(response_format={"type": "json_object"}), "unsupported_parameter", "response_format"),
    "best_of": (text(best_of=2), "unsupported_parameter", "best_of"),
    "skip_special_tokens": (chat(skip_special_tokens=False), "unsupported_parameter", "skip_special_tokens"),
    # Context: 8,192 tokens. "Hello" is one token of text; the chat template puts 30 around it.
    "context": (text(max_tokens=8192), "context_length_exceeded", "max_tokens"),
    "context of chat": (chat(max_completion_tokens=8192), "context_length_exceeded", "max_completion_tokens"),
    "far over": (text(max_tokens=10**15), "context_length_exceeded", "max_tokens"),
    "prompt fills it": (text(prompt=[5] * 8192), "context_length_exceeded", "prompt"),
    "chat fills it": (chat(messages=[{"role": "user", "content": " a" * 9000}]), "context_length_exceeded", "messages"),
    # The hand-over.
    "params text": (chat(kv_transfer_params="x"), "invalid_type", "kv_transfer_params"),
    "params empty": (chat(kv_transfer_params={}), "invalid_value", "kv_transfer_params"),
    "params other": (chat(kv_transfer_params={"do_remote_prefill": True}), "invalid_value", "kv_transfer_params"),
    "forged": (chat(kv_transfer_params={"ticket": "AAAA"}), "invalid_value", "kv_transfer_params.ticket"),
    "ticket number": (chat(kv_transfer_params={"ticket": 1}), "invalid_value", "kv_transfer_params.ticket"),
    "streaming prefill": (
        chat(kv_transfer_params={"do_remote_decode": True}, stream=True),
        "invalid_value",
        "stream",
    ),
    "do_remote_decode with a host": (
        chat(kv_transfer_params={"do_remote_decode": True, "remote_host": "x"}),
        "invalid_value",
        "kv_transfer_params.remote_host",
    ),
}


async def refused(server: Server, request: tuple[str, Any], status: int, **headers: str) -> dict[str, Any]:
    """The error, whose shape is checked; nothing reached the engine."""
    answered, body = await server.post(*request, **headers)
    assert answered == status, body
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert isinstance(error["message"], str)
    assert len(error["message"]) > 10
    assert server.admission.of(SubmitRequest) == []
    return error


async def test_every_row(description: ModelDescription) -> None:
    found = {}
    async with serving(description) as server:
        for case, (request, _, _) in INVALID.items():
            error = await refused(server, request, 400)
            found[case] = (error["type"], error["code"], error["param"])
        assert server.metric("kvyard_requests_total", outcome="refused") == len(INVALID)
    assert found == {case: ("invalid_request_error", code, param) for case, (_, code, param) in INVALID.items()}


async def test_an_overlong_request_is_told_both_numbers(description: ModelDescription) -> None:
    async with serving(description, max_model_len=100) as server:
        error = await refused(server, text(prompt=[5] * 60, max_tokens=41), 400)
        assert "100 tokens" in error["message"]
        assert "has 60" in error["message"]
        assert "41" in error["message"]
        # At the limit it is served.
        assert (await server.post(*text(prompt=[5] * 60, max_tokens=40)))[0] == 200


async def test_a_text_far_too_long_is_not_even_tokenised(description: ModelDescription) -> None:
    """The longest token of SmolLM2 has 81 characters, so 100,001 times that many are more than 100,000 tokens."""
    words = "word " * 1_620_000
    async with serving(description, max_model_len=100_000) as server:
        for request, param, least in (
            (text(prompt=words + "x"), "prompt", 100_001),
            (chat(messages=[{"role": "user", "content": words}]), "messages", 100_002),  # with the template's text
        ):
            error = await refused(server, request, 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert f"holds 100000 tokens, the prompt has at least {least}" in error["message"]


async def test_a_body_that_is_not_what_its_header_says(description: ModelDescription) -> None:
    async with serving(description) as server:
        error = await refused(server, raw(b"no gzip"), 400, **{"Content-Encoding": "gzip"})
        assert error["code"] == "invalid_body"


async def test_unknown_model(description: ModelDescription) -> None:
    async with serving(description, served_model_name="mine") as server:
        for request in (chat(), text()):
            error = await refused(server, request, 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert (await server.get(f"/v1/models/{MODEL}"))[0] == 404
        assert (await server.get("/v1/models/mine"))[1]["id"] == "mine"


async def test_unknown_routes_and_methods(description: ModelDescription) -> None:
    async with serving(description) as server:
        assert (await refused(server, ("/v1/embeddings", {}), 404))["code"] == "unknown_url"
        assert (await refused(server, ("/v1/models", {}), 405))["code"] == "method_not_allowed"
        status, body = await server.get("/v1/chat/completions")
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")


async def test_a_body_too_large(description: ModelDescription) -> None:
    async with serving(description, max_body_bytes=1000) as server:
        error = await refused(server, text(prompt="a" * 2000), 413)
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
        assert (await server.post(*text(prompt="a" * 500)))[0] == 200


async def test_the_key(description: ModelDescription) -> None:
    async with serving(description, api_key="gehèim") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic gehèim"}):
            for path in ("/v1/models", "/v1/chat/completions", "/v1/nothing", "/debug/engine", "/tokenize"):
                status, body = await server.get(path, **headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
                assert body["error"]["type"] == "authentication_error"
        for path in ("/health", "/ready", "/metrics"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200
        assert (await server.get("/v1/models", Authorization="bearer gehèim"))[0] == 200


async def test_a_timeout_header_that_is_no_time(description: ModelDescription) -> None:
    async with serving(description) as server:
        for header in ("0", "-1", "nan", "inf", "soon", ""):
            error = await refused(server, chat(), 400, **{"X-Request-Timeout": header})
            assert error["param"] == "X-Request-Timeout"


async def test_what_the_engine_refuses(description: ModelDescription) -> None:
    async with serving(description) as server:
        for reason in RefusalReason:
            server.admission.script = Script(refusal=RequestRefused(reason, "because of this", param="max_tokens"))
            for stream in (False, True):
                status, body = await server.post(*chat(stream=stream))
                assert status == reason.http_status
                assert body["error"]["message"] == "because of this"
                assert (body["error"]["code"], body["error"]["param"]) == (reason.value, "max_tokens")
        # Never accepted, so nothing to close.
        assert {type(message) for message in server.admission.messages} == {SubmitRequest}


async def test_hand_overs_need_a_secret_and_the_right_role(description: ModelDescription) -> None:
    prefill = chat(kv_transfer_params={"do_remote_decode": True})
    decode = chat(kv_transfer_params={"ticket": "AAAA"})
    async with serving(description, kv_secret=None) as server:
        assert "--kv-secret-file" in (await refused(server, prefill, 400))["message"]
        assert "--kv-secret-file" in (await refused(server, decode, 400))["message"]
    async with serving(description, role="decode") as server:
        assert "role decode" in (await refused(server, prefill, 400))["message"]
    async with serving(description, role="prefill") as server:
        assert "role prefill" in (await refused(server, decode, 400))["message"]


async def test_an_error_quotes_no_more_than_a_little(description: ModelDescription) -> None:
    """A model, a role and a field of a megabyte each: the answer names the field and stays small."""
    long = "m" * 1_000_000
    async with serving(description) as server:
        for (path, body), param in (
            (chat(model=long), "model"),
            (message(role=long, content="x"), "messages[1].role"),
            (chat(**{long: 1}), "m" * 98 + " … " + "m" * 98),
        ):
            _, answer = await server.post(path, body)
            assert answer["error"]["param"] == param
            assert len(answer["error"]["message"]) <= 1000
