"""What every listener does, whichever application it serves."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from aiohttp import web

from api.middleware import openai_errors
from api.serving import serve

ROOT = Path(__file__).parents[2]
HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 no HTTP at all\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    ],
)
async def test_malformed_http_is_400_and_no_trace_in_the_log(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    app = web.Application(middlewares=[openai_errors])
    app.router.add_post("/echo", echo)
    runner, port = await serve(app, "127.0.0.1", 0)
    with caplog.at_level(logging.DEBUG):
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            await connection.send(sent)
            with anyio.fail_after(5):
                answer = await connection.receive()
        await runner.cleanup()
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO] == []


async def test_a_fault_of_ours_keeps_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: web.Request) -> web.Response:
        raise ZeroDivisionError("ours")

    app = web.Application()
    app.router.add_post("/echo", broken)
    runner, port = await serve(app, "127.0.0.1", 0)
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(HEAD + b"Content-Length: 0\r\n\r\n")
        assert b" 500 " in (await connection.receive()).split(b"\r\n")[0]
    await runner.cleanup()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


def test_a_listener_may_have_more_open_files_than_the_shell_s_limit() -> None:
    """As on most machines: soft 1,024, hard more. Serving raises the soft limit to the hard one (here 4,096)."""
    code = (
        "import asyncio, resource; from aiohttp import web; from api.serving import serve\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))\n"
        "asyncio.run(serve(web.Application(), '127.0.0.1', 0))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout == "(4096, 4096)\n"
