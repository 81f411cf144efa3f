"""What goes over a link's socket: length-prefixed frames, each a small header, a mailbox's name and a msgpack body.

    length  uint32  bytes of name and body        name    UTF-8, empty for answers
    kind    uint8                                 body    msgpack of one Struct (see Kind)
    name    uint8   bytes of the name
    number  uint64  which ask, or how many credits (little-endian, like the length)

Pure: bytes in, frames out. Invariant: a frame is handed out whole, once, in the order it came.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("<IBBQ")
MAX_BODY = 64 << 20  # bytes
_CHUNK = 64 << 10  # bytes; what the reader keeps between large frames


class Kind(IntEnum):
    TELL = 1  # name, body: the message
    ASK = 2  # name, number, body: the message
    PING = 3  # name, number; takes no credit
    ANSWER = 4  # number, body: the value
    FAILURE = 5  # number, body: ErrorMessage
    CREDIT = 6  # name, number of messages that the actor has taken
    GONE = 7  # name, body: why, as msgpack text: nothing more is accepted
    BROKEN = 8  # body: why, as msgpack text; the sender ends the link


_KINDS = {int(kind): kind for kind in Kind}


class ProtocolError(Exception):
    """What came is not what this protocol allows. Ends the link: both sides are ours, so one of them is wrong."""


class Frame(NamedTuple):
    kind: Kind
    number: int
    name: bytes
    body: memoryview  # into the reader's buffer: good until the next `room()`


def pack(kind: Kind, *, name: bytes = b"", number: int = 0, body: bytes = b"") -> bytes:
    """Raises ValueError for a body over 64 MiB."""
    if len(body) > MAX_BODY:
        raise ValueError(f"a message of {len(body)} bytes is too large for a link: at most {MAX_BODY}")
    return HEADER.pack(len(name) + len(body), kind, len(name), number) + name + body


class FrameReader:
    """Receive into `room()`, say how much with `received`, then call `next_frame` until it is None."""

    def __init__(self) -> None:
        self._buffer = bytearray(_CHUNK)
        self._start = 0  # of what has not been handed out
        self._end = 0
        self._needed = HEADER.size  # bytes of the frame that begins at `_start`, as far as known

    def room(self) -> memoryview:
        waiting = self._end - self._start
        size = max(_CHUNK, self._needed)
        if size != len(self._buffer):
            buffer = bytearray(size)
            buffer[:waiting] = memoryview(self._buffer)[self._start : self._end]
            self._buffer = buffer
        elif self._start and waiting:
            self._buffer[:waiting] = self._buffer[self._start : self._end]
        self._start, self._end = 0, waiting
        return memoryview(self._buffer)[waiting:]

    def received(self, count: int) -> None:
        self._end += count

    def next_frame(self) -> Frame | None:
        """Raises ProtocolError."""
        start = self._start
        if self._end - start < HEADER.size:
            self._needed = HEADER.size
            return None
        length, kind, name_length, number = HEADER.unpack_from(self._buffer, start)
        if kind not in _KINDS or not name_length <= length <= MAX_BODY + name_length:
            raise ProtocolError(f"no frame begins with kind {kind}, name {name_length}, length {length}")
        body_start, end = start + HEADER.size + name_length, start + HEADER.size + length
        if end > self._end:
            self._needed = end - start
            return None
        self._start, self._needed = end, HEADER.size
        view = memoryview(self._buffer)
        return Frame(_KINDS[kind], number, bytes(view[start + HEADER.size : body_start]), view[body_start:end])
