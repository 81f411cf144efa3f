"""Puts an aiohttp application on a port."""

from __future__ import annotations

import errno

from aiohttp import web

from actors.messages.errors import ConfigurationError

PORT = web.AppKey("port", list[int])


async def serve(
    app: web.Application, host: str, port: int, *, shutdown_timeout: float = 1.0
) -> tuple[web.AppRunner, int]:
    """Listens, and returns the runner (`await runner.cleanup()` ends it) and the bound port; port 0 picks a free one.

    A client that goes away cancels its handler. `shutdown_timeout` is how many seconds `cleanup` waits for handlers.
    Raises ConfigurationError when the address cannot be bound.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
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
