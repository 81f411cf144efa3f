"""How every process of kvyard starts its event loop: anyio on uvloop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


def run(main: Callable[[Unpack[Arguments]], Awaitable[T]], *arguments: *Arguments) -> T:
    """Returns what `main(*arguments)` returns, raises what it raises."""
    return anyio.run(main, *arguments, backend="asyncio", backend_options={"use_uvloop": True})
