"""Copies what a child writes to this process's stderr, line by line, each with the child's name before it."""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio

CHUNK = 1 << 16
LONGEST_LINE = 1 << 16  # bytes; a longer one is cut into several


class PrefixedLines:
    """Bytes in, whole lines with a prefix out."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def end(self) -> bytes:
        return self.feed(b"\n") if self._rest else b""


async def relay(descriptor: int, prefix: str, write: Callable[[bytes], object]) -> None:
    """Until nobody holds the other end of the pipe; closes `descriptor`."""
    os.set_blocking(descriptor, False)
    lines = PrefixedLines(prefix)
    try:
        while True:
            await anyio.wait_readable(descriptor)
            data = os.read(descriptor, CHUNK)
            if not data:
                break
            if out := lines.feed(data):
                write(out)
    finally:
        if out := lines.end():
            write(out)
        os.close(descriptor)
