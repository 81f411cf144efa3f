"""Puts an aiohttp application on a port: as many connections as the machine allows, and a log without the clients'
malformed HTTP in it (one line each, no trace: it would be theirs to fill)."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource

from aiohttp import web
from aiohttp.http import HttpProcessingError

from actors.messages.errors import ConfigurationError

PORT = web.AppKey("port", list[int])
MAX_OPEN_FILES = 1 << 16


class _ClientsFault(logging.Filter):
    """What is wrong with a client's bytes becomes one line at INFO."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
            record.msg, record.args = "bad_http %s", (" ".join(str(error).split())[:200],)
        return True


_protocol_logger = logging.getLogger(f"{__name__}.protocol")
_protocol_logger.addFilter(_ClientsFault())


async def serve(
    app: web.Application, host: str, port: int, *, shutdown_timeout: float = 1.0
) -> tuple[web.AppRunner, int]:
    """Listens, and returns the runner (`await runner.cleanup()` ends it) and the bound port; port 0 picks a free one.

    A client that goes away cancels its handler. `shutdown_timeout` is how many seconds `cleanup` waits for handlers.
    Raises ConfigurationError when the address cannot be bound.
    """
    allow_many_connections()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=_protocol_logger,
        shutdown_timeout=shutdown_timeout,
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use: stop what listens there, or choose another with --port"
            ) from error
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    bound = int(runner.addresses[0][1])
    if PORT in app:
        app[PORT].append(bound)
    return runner, bound


def allow_many_connections() -> None:
    """Raises this process's soft limit of open files towards the hard one. The usual 1,024 end a router at about 500
    requests, and what fails then is refused as if the engines were at fault."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
