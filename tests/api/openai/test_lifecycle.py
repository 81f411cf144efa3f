"""From submission to the last byte: aborts, deadlines, failures, and that every accepted request is closed once."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import pytest

from actors.configuration import EngineConfiguration
from actors.messages.admission import AbortRequest, ResponseClosed, SubmitRequest
from actors.messages.errors import ConfigurationError, RefusalReason
from actors.messages.model import ModelDescription
from api.engine_process import run_engine
from api.openai.app import make_app
from api.serving import serve
from tests.api.openai.scripted import MODEL, Script, ScriptedEngine, Server, closings, events, one_by_one, serving

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


async def start(server: Server, body: dict[str, Any]) -> socket.socket:
    """Sends the request on a bare socket, and waits until the engine has it."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    raw = msgspec.json.encode(body)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    await server.admission.wait_for(SubmitRequest)
    return connection


def read_to_the_end(connection: socket.socket) -> bytes:
    connection.settimeout(10)
    received = b""
    with suppress(ConnectionResetError):
        while some := connection.recv(1 << 16):
            received += some
    return received


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token(description: ModelDescription, stream: bool) -> None:
    async with serving(description) as server:
        server.admission.script = Script(pause_after=0)
        (await start(server, {**HELLO, "stream": stream})).close()
        await server.admission.wait_for(ResponseClosed)
        assert await closings(server.admission) == [("abort", "the client is gone"), ("closed", "abort")]
        assert server.metric("kvyard_requests_total", outcome="abort") == 1
        (abort,) = server.admission.of(AbortRequest)
        assert abort.request_id == server.admission.request.request_id


async def test_a_client_that_leaves_in_the_stream(description: ModelDescription, tokenizer: Any) -> None:
    async with serving(description) as server:
        server.admission.script = Script(one_by_one(tokenizer, "One two three"), pause_after=2)
        connection = await start(server, {**HELLO, "stream": True})
        await anyio.wait_readable(connection)
        connection.close()
        await server.admission.wait_for(ResponseClosed)
        assert await closings(server.admission) == [("abort", "the client is gone"), ("closed", "abort")]


async def test_clients_that_leave_wherever_they_are(description: ModelDescription, tokenizer: Any) -> None:
    """Each accepted request is closed once, and aborted unless its answer was whole."""
    async with serving(description) as server:
        server.admission.script = Script(one_by_one(tokenizer, "One two three four five six"))

        async def ask(stream: bool) -> None:
            body = msgspec.json.encode({**HELLO, "stream": stream})
            async with server.http.post(server.url + CHAT, data=body) as response:
                await response.read()

        async def leave_early(steps: int) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, steps % 2 == 0)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()

        async def leave_after(chunks: int) -> None:
            body = msgspec.json.encode({**HELLO, "stream": True})
            async with server.http.post(server.url + CHAT, data=body) as response:
                for _ in range(chunks):
                    await response.content.readany()

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(leave_early, number)
                tasks.start_soon(leave_after, number % 10)
        submitted = [message.request.request_id for message in server.admission.of(SubmitRequest)]
        assert len(submitted) >= 100
        closed = await server.admission.wait_for(ResponseClosed, len(submitted))
        assert sorted(message.request_id for message in closed) == sorted(submitted)
        aborted = [message.request_id for message in server.admission.of(AbortRequest)]
        assert sorted(aborted) == sorted(message.request_id for message in closed if message.outcome == "abort")
        assert {message.outcome for message in closed} == {"abort", "stop"}


async def test_deadline_before_the_first_token(description: ModelDescription) -> None:
    async with serving(description) as server:
        server.admission.script = Script(pause_after=0)
        for stream, body, headers in (
            (False, {"timeout": 0.5}, {}),
            (True, {"timeout": 0.5}, {}),
            (True, {}, {"X-Request-Timeout": "0.5"}),
            (True, {"timeout": 100}, {"X-Request-Timeout": "0.5"}),
            (True, {"timeout": 0.5}, {"X-Request-Timeout": "100"}),
        ):
            server.admission.messages.clear()
            began = time.monotonic()
            status, answer = await server.post(CHAT, {**HELLO, "stream": stream, **body}, **headers)
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
            assert 0.5 <= time.monotonic() - began < 10
            request = server.admission.request
            assert request.deadline - request.arrival == pytest.approx(0.5)
            assert await closings(server.admission) == [("abort", "deadline"), ("closed", "error")]


async def test_the_default_deadline(description: ModelDescription) -> None:
    async with serving(description, request_timeout=77) as server:
        await server.post(CHAT, HELLO)
        assert server.admission.request.deadline - server.admission.request.arrival == pytest.approx(77)


async def test_deadline_in_the_stream(description: ModelDescription, tokenizer: Any) -> None:
    async with serving(description) as server:
        server.admission.script = Script(one_by_one(tokenizer, "One two three"), pause_after=3)
        body = msgspec.json.encode({**HELLO, "stream": True, "timeout": 0.3})
        async with server.http.post(server.url + CHAT, data=body) as response:
            assert response.status == 200
            *chunks, last = events(await response.read())
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "One two three"
        assert last["error"]["code"] == "deadline_exceeded"
        assert await closings(server.admission) == [("abort", "deadline"), ("closed", "error")]


async def test_a_client_that_does_not_read_is_cut_off_at_its_deadline(
    description: ModelDescription, tokenizer: Any
) -> None:
    """More text than all buffers between the two hold, and nobody who reads it."""
    text = tuple(tokenizer.encode(" word" * 4000).ids)
    async with serving(description, max_model_len=10_000_000) as server:
        server.admission.script = Script((text,) * 400)
        connection = await start(server, {**HELLO, "stream": True, "timeout": 1})
        await server.admission.wait_for(ResponseClosed)
        assert await closings(server.admission) == [("abort", "deadline"), ("closed", "error")]
        with connection:
            received = await anyio.to_thread.run_sync(read_to_the_end, connection)
        assert b" word word" in received
        assert b"[DONE]" not in received


async def test_the_engine_fails(description: ModelDescription, tokenizer: Any) -> None:
    async with serving(description) as server:
        died = (RefusalReason.ENGINE_UNAVAILABLE, "the worker died")
        # Before the first token: a status. After it: an event, and no [DONE].
        server.admission.script = Script(error=died)
        for stream in (False, True):
            status, body = await server.post(CHAT, {**HELLO, "stream": stream})
            assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        server.admission.script = Script(one_by_one(tokenizer, "One two"), error=died)
        assert (await server.post(CHAT, HELLO))[0] == 503
        body = msgspec.json.encode({**HELLO, "stream": True})
        async with server.http.post(server.url + CHAT, data=body) as response:
            *_, last = events(await response.read())
        assert last == {
            "error": {
                "message": "the worker died",
                "type": "server_error",
                "param": None,
                "code": "engine_unavailable",
            }
        }
        assert await closings(server.admission, 4) == [("closed", "error")] * 4


async def test_a_request_that_the_engine_gives_up_is_an_error(description: ModelDescription) -> None:
    """Not an answer that ends with a finish_reason no client knows."""
    async with serving(description) as server:
        server.admission.script = Script(((5000,),), given_up=True)
        status, body = await server.post(CHAT, HELLO)
        assert (status, body["error"]["code"]) == (503, "aborted")
        assert await closings(server.admission) == [("closed", "abort")]
        async with server.http.post(server.url + CHAT, json={**HELLO, "stream": True}) as response:
            *_, last = events(await response.read())
        assert (response.status, last["error"]["code"]) == (200, "aborted")


async def test_the_admission_actor_is_gone(description: ModelDescription) -> None:
    async with serving(description) as server:
        await server.system.stop(server.engine.admission, 1)
        status, body = await server.post(CHAT, HELLO)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert (await server.get("/debug/blocks"))[0] == 503


async def test_an_unforeseen_error_is_a_500_that_tells_nothing(
    description: ModelDescription, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: ScriptedEngine) -> None:
        raise LookupError("a secret detail")

    monkeypatch.setattr(ScriptedEngine, "health", broken)
    async with serving(description) as server:
        status, body = await server.get("/health")
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in str(body)
    assert "a secret detail" in caplog.text


async def test_x_request_id(description: ModelDescription) -> None:
    async with serving(description) as server:
        for given, kept in (
            ("abc-1.2:x_Y", True),
            ("a" * 128, True),
            ("a" * 129, False),
            ("with space", False),
            ("", False),
        ):
            async with server.http.get(server.url + "/nothing", headers={"X-Request-ID": given}) as response:
                echoed = response.headers["X-Request-ID"]
            assert (echoed == given) is kept
            assert echoed


async def test_two_requests_with_one_id_are_two_requests(description: ModelDescription) -> None:
    async with serving(description) as server:
        for _ in range(2):
            async with server.http.post(
                server.url + CHAT, data=msgspec.json.encode(HELLO), headers={"X-Request-ID": "same"}
            ) as response:
                assert response.headers["X-Request-ID"] == "same"
        first, second = server.admission.of(SubmitRequest)
        assert first.request.request_id != second.request.request_id
        assert [first.trace_id, second.trace_id] == ["same", "same"]


async def test_an_id_that_the_endpoint_made_goes_with_its_request_too(description: ModelDescription) -> None:
    async with (
        serving(description) as server,
        server.http.post(server.url + CHAT, data=msgspec.json.encode(HELLO)) as response,
    ):
        (submitted,) = server.admission.of(SubmitRequest)
        assert submitted.trace_id == response.headers["X-Request-ID"] != ""


async def test_a_port_in_use(description: ModelDescription) -> None:
    async with serving(description) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"port {port} on 127.0.0.1 is in use"):
            await serve(make_app(server.engine), "127.0.0.1", port)
        with pytest.raises(ConfigurationError, match="cannot listen on 192"):
            await serve(make_app(server.engine), "192.0.2.1", 0)


async def test_an_engine_that_cannot_start_says_why_and_not_in_a_group(description: ModelDescription) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        configuration = EngineConfiguration(port=port, kv_memory=64 << 20, engine_id="engine")
        with pytest.raises(ConfigurationError, match=f"port {port} on 127.0.0.1 is in use"):
            await run_engine(configuration, description, None)
    no_weights = msgspec.structs.replace(description, weights="/nowhere/model.gguf")
    with pytest.raises(ConfigurationError, match=r"the worker process .* see the line above"):
        await run_engine(msgspec.structs.replace(configuration, port=0), no_weights, None)


async def test_the_client_of_a_stream_gets_headers_with_the_first_token(
    description: ModelDescription, tokenizer: Any
) -> None:
    async with serving(description) as server:
        script = server.admission.script = Script(one_by_one(tokenizer, "One"), pause_after=0)
        answer = server.http.post(server.url + CHAT, data=msgspec.json.encode({**HELLO, "stream": True}))
        arrived: list[aiohttp.ClientResponse] = []

        async def wait() -> None:
            arrived.append(await answer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await server.admission.wait_for(SubmitRequest)
            await server.get("/health")  # a whole round trip later
            assert arrived == []
            script.go_on.set()
        assert arrived[0].headers["X-Request-ID"]
        arrived[0].close()
