"""The step log's bytes, and what can be wrong with them.

    file    := magic(7) version(1) deflate            one raw deflate stream, synced whenever the writer flushed
    deflate := record*                                ended by its final block only when the log was closed
    record  := length(u32) crc32(length)(u32) crc32(payload)(u32) payload     little-endian; payload: msgpack `Record`

The first record is the `Header`. A length has its own checksum, so that a damaged one is never taken for a tail that
was cut off.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from actors.messages.errors import KvyardError
from actors.scheduling.records import FORMAT_VERSION

MAGIC = b"KVYSTEP"
OPENING = MAGIC + bytes([FORMAT_VERSION])
PREFIX = struct.Struct("<III")
_LENGTH = struct.Struct("<I")


class StepLogError(KvyardError):
    """The file cannot be read as a step log from `offset` (bytes of the file) on."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        self.path, self.offset, self.what = path, offset, what
        super().__init__(f"{path}: {what} (byte {offset})")


class NotAStepLog(StepLogError):
    """`is_beginning`: the bytes there are begin as a step log does, which was cut off before its header was whole."""

    def __init__(self, path: Path, offset: int, what: str, *, is_beginning: bool) -> None:
        self.is_beginning = is_beginning
        super().__init__(path, offset, what)


class WrongVersion(StepLogError):
    """A step log of another version of the format."""

    def __init__(self, path: Path, version: int) -> None:
        self.version = version
        super().__init__(
            path,
            len(MAGIC),
            f"a step log of format {version}, this kvyard reads {FORMAT_VERSION}: use the kvyard that wrote it",
        )


class DamagedStepLog(StepLogError):
    """What is before `offset` was read; the record there, or some bytes after it, is not what was written."""


def checksum_of_length(length: int) -> int:
    return zlib.crc32(_LENGTH.pack(length))
