"""Frames of the control protocol on a byte stream.

    u32 length of body │ u32 call id │ body: one msgpack Struct        (little-endian)

The call id pairs a reply with its request, so a caller that has given up does not hold up those behind it. Behind a
`BlocksFollow` come its raw bytes, without a frame. A frame that breaks the rules ends its connection, nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from actors.messages.lease import ControlReply, ControlRequest

MAX_FRAME_BYTES = 1 << 20
HEADER = struct.Struct("<II")

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(ControlRequest).decode
_decode_reply = msgspec.msgpack.Decoder(ControlReply).decode


class ProtocolError(Exception):
    """The peer sent what is no frame, or no message of the protocol."""


def frame(call: int, message: ControlRequest | ControlReply) -> bytes:
    body = _encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body), call) + body


def decode_request(body: bytes) -> ControlRequest:
    try:
        return _decode_request(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a request: {error}") from error


def decode_reply(body: bytes) -> ControlReply:
    try:
        return _decode_reply(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a reply: {error}") from error


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields (call id, body) for every frame that is whole now. Raises ProtocolError."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= HEADER.size:
            length, call = HEADER.unpack_from(buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = HEADER.size + length
            if len(buffer) < end:
                return
            body = bytes(memoryview(buffer)[HEADER.size : end])
            del buffer[:end]
            yield call, body
