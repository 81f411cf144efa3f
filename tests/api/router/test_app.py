"""What the router itself answers, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from yarl import URL

from tests.api.router.fakes import KEY, FakeEngine, Router, deployment

ROOT = Path(__file__).parents[3]


def pair() -> list[FakeEngine]:
    return [FakeEngine("prefill-0", worker_pids=[31]), FakeEngine("decode-0", epoch=3)]


@pytest.mark.parametrize(
    ("body", "headers", "code", "param", "words"),
    # Codes and words are those of an engine: tests/api/openai/test_bad_input.py has the same.
    [
        (b'{"kv_transfer_params": {"ticket": "forged"}}', {}, "invalid_value", "kv_transfer_params", "leave it out"),
        (b'{"prompt": ', {}, "invalid_json", None, "not JSON"),
        (b'{"prompt": "\xff"}', {}, "invalid_json", None, "not JSON in UTF-8"),
        (b"[1]", {}, "invalid_json", None, "JSON object"),
        (b"[" * 100_000, {}, "invalid_json", None, "nested too deep"),
        (b'{"timeout": "soon"}', {}, "invalid_type", "timeout", "got `str`"),
        (b'{"timeout": 0}', {}, "invalid_value", "timeout", "> 0"),
        (b'{"timeout": true}', {}, "invalid_type", "timeout", "got `bool`"),
        (b"{}", {"X-Request-Timeout": "-1"}, "invalid_value", "X-Request-Timeout", "above 0"),
        (b"{}", {"X-Request-Timeout": "nan"}, "invalid_value", "X-Request-Timeout", "above 0"),
    ],
)
async def test_what_the_router_refuses_itself(
    body: bytes, headers: dict[str, str], code: str, param: Any, words: str
) -> None:
    engines = pair()
    async with deployment(*engines) as router, router.post(json=None, data=body, headers=headers) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (400, code, param)
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
    assert [engine.requests for engine in engines] == [[], []]


async def stalled_body(router: Router, path: str, header: str = "") -> bytes:
    """The answer to a request whose body never comes whole."""
    async with await anyio.connect_tcp("127.0.0.1", urlsplit(router.url).port or 0) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{header}Content-Length: 99\r\n\r\n"
        await connection.send(head.encode() + b'{"prompt')
        with anyio.fail_after(5):
            return await connection.receive()


async def test_a_body_that_does_not_come_ends_at_the_deadline() -> None:
    async with deployment(*pair(), request_timeout=0.2) as router:
        for path in ("/v1/completions", "/tokenize"):
            answer = await stalled_body(router, path)
            assert answer.startswith(b"HTTP/1.1 504 ")
            assert b'"code":"deadline_exceeded"' in answer
    async with deployment(*pair()) as router:
        answer = await stalled_body(router, "/v1/completions", "X-Request-Timeout: 0.2\r\n")
        assert answer.startswith(b"HTTP/1.1 504 ")


async def test_the_body_s_time_counts() -> None:
    """The deadline is counted from the request's arrival, also when its body dawdles."""
    engines = pair()
    async with deployment(*engines) as router:

        async def dawdles() -> AsyncIterator[bytes]:
            yield b'{"prompt": "x", '
            await anyio.sleep(0.5)
            yield b'"timeout": 100}'

        async with router.post(json=None, data=dawdles()) as answer:
            assert answer.status == 200
        headers, _ = engines[1].requests[0]
        assert float(headers["X-Request-Timeout"]) <= 99.5


async def test_time_that_is_nearly_over_is_no_wrong_header() -> None:
    """A remaining 1e-9 s is told to the engine as a time above 0, or it would call the header wrong."""
    engines = pair()
    async with deployment(*engines) as router, router.post(json={"timeout": 1e-9}) as answer:
        assert answer.status in (200, 504)
    assert all(float(headers["X-Request-Timeout"]) > 0 for engine in engines for headers, _ in engine.requests)


async def test_an_id_leads_to_no_other_route_of_an_engine() -> None:
    async with deployment(*pair()) as router:
        for path in ("/debug/requests/..%2f..%2fdebug%2fblocks", "/v1/models/..%2f..%2fdebug%2fblocks"):
            async with router.session.get(URL(router.url + path, encoded=True)) as answer:
                assert answer.status == 404, await answer.text()


async def test_a_null_kv_transfer_params_is_no_field_at_all() -> None:
    engines = pair()
    async with deployment(*engines) as router, router.post(json={"kv_transfer_params": None}) as answer:
        assert answer.status == 200
    assert engines[1].bodies[0]["kv_transfer_params"] == {"ticket": "sealed"}


async def test_a_body_beyond_the_limit_is_413_and_the_router_lives_on() -> None:
    async with deployment(*pair(), max_body_bytes=1000) as router:
        async with router.post(data=b"x" * 1001, json=None) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (413, "invalid_request_error")
        async with router.post() as answer:
            assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/debug/engines", "/debug/blocks", "/debug/requests/x"])
async def test_a_wrong_key_is_401_with_a_message(path: str) -> None:
    async with deployment(*pair()) as router:
        for key in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            async with router.session.get(router.url + path, headers=key) as answer:
                assert answer.status == 401
                assert "Bearer" in (await answer.json())["error"]["message"]
        for path in ("/health", "/ready", "/metrics"):
            async with router.session.get(router.url + path, headers={"Authorization": ""}) as answer:
                assert answer.status == 200


async def test_health_is_whether_anybody_can_decode() -> None:
    prefill, decode = pair()
    async with deployment(prefill, decode) as router:
        for well, status in ((False, 503), (True, 200)):
            decode.report.update(healthy=well, reason="" if well else "its pool is in quarantine")
            await decode.known()
            async with router.get("/health") as answer:
                assert answer.status == status
                if not well:
                    assert answer.headers["Retry-After"] == "1"
                    assert "decode-0: its pool is in quarantine" in (await answer.json())["error"]["message"]


async def test_debug_engines_is_the_list_of_the_design() -> None:
    prefill, decode = pair()
    async with deployment(prefill, decode) as router, router.get("/debug/engines") as answer:
        listed = await answer.json()
    common = {"pid": 17, "healthy": True, "reason": "", "paused": "none"}
    assert listed == [
        {"engine_id": "prefill-0", "role": "prefill", "url": prefill.url, "worker_pids": [31], "epoch": 1, **common},
        {"engine_id": "decode-0", "role": "decode", "url": decode.url, "worker_pids": [18], "epoch": 3, **common},
    ]


async def test_the_engines_debug_pages_come_together() -> None:
    async with deployment(*pair()) as router:
        async with router.get("/debug/blocks") as answer:
            assert await answer.json() == {e: {"usable": 4, "engine": e} for e in ("prefill-0", "decode-0")}
        async with router.get("/debug/requests/known") as answer:
            assert await answer.json() == {
                "request_id": "known",
                "engines": {e: {"intervals": [e]} for e in ("prefill-0", "decode-0")},
            }
        async with router.get("/debug/requests/unknown") as answer:
            assert answer.status == 404


async def test_models_and_tokens_come_from_any_engine_that_answers() -> None:
    async with deployment(*pair()) as router:
        async with router.get("/v1/models") as answer:
            assert await answer.json() == {"data": [{"id": "fake"}]}
        async with router.post("/tokenize", json={"prompt": "ab"}) as answer:
            assert await answer.json() == {"tokens": [1, 2], "count": 2}


async def test_metrics_are_the_router_s_own_and_its_engines_with_their_id() -> None:
    async with deployment(*pair()) as router:
        async with router.post() as answer:
            await answer.read()
        async with router.get("/metrics") as answer:
            text = await answer.text()
    lines = text.splitlines()
    for engine in ("prefill-0", "decode-0"):
        assert f'kvyard_kv_blocks{{engine_id="{engine}",state="free"}} 1.0' in lines
        assert f'kvyard_requests_total{{engine_id="{engine}",outcome="stop"}} 1.0' in lines
    assert lines.count("# TYPE kvyard_kv_blocks gauge") == 1  # one family, or a scraper refuses the page
    assert 'kvyard_router_requests_total{outcome="completed"} 1.0' in lines
    assert 'kvyard_router_engine_healthy{engine_id="decode-0",role="decode"} 1.0' in lines
    assert any(line.startswith('kvyard_router_probe_age_seconds{engine_id="decode-0"') for line in lines)


async def test_an_unknown_route_and_a_wrong_method_have_the_shape_of_errors() -> None:
    async with deployment(*pair()) as router:
        async with router.get("/v1/nothing") as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (404, "invalid_request_error")
        async with router.get("/v1/completions") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_router(port: int, *flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tools.cli", "router", "--decode", "http://127.0.0.1:1", f"--port={port}", *flags]
    return subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_command_serves_drains_on_sigterm_and_refuses_a_port_in_use() -> None:
    port = free_port()
    with start_router(port) as router:
        assert router.stderr is not None
        assert router.stderr.readline() == f"kvyard router: http://127.0.0.1:{port}/v1\n"
        with start_router(port) as second:
            out, err = second.communicate(timeout=20)
        assert (second.returncode, out) == (1, "")
        assert err.splitlines()[-1].startswith(f"kvyard router: port {port} on 127.0.0.1 is in use")
        os.kill(router.pid, signal.SIGTERM)
        out, _ = router.communicate(timeout=20)
        assert (router.returncode, out) == (0, "")


def test_the_router_process_is_light() -> None:
    code = "import sys, api.router.process; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(result.stdout.replace("'", '"')) == []
