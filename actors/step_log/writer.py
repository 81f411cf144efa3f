"""Writes the step log: records are gathered in one buffer, and each flush is one write to the file.

A log never stops its engine: when the file cannot be written, one line says so, `failed` is called, and the rest is
not logged. Prompts and the capabilities of tickets stand in it, so only its owner may read it. No fsync: what a flush
wrote survives the engine's death, not the machine's.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from actors.messages.errors import ConfigurationError
from actors.scheduling.records import Header, Record
from actors.step_log.format import OPENING, PREFIX, NotAStepLog, StepLogError, checksum_of_length
from actors.step_log.reader import read

LEVEL = 1
_ROOM = bytes(PREFIX.size)

log = logging.getLogger(__name__)


class RecordSink(Protocol):
    """What the engine sees of its step log."""

    def write(self, record: Record) -> None: ...
    def flush(self) -> None:
        """What was written so far outlives this process."""

    def close(self) -> None:
        """Nothing follows; harmless the second time."""


class NoStepLog:
    def write(self, record: Record) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_STEP_LOG = NoStepLog()


class StepLog:
    """Made by `open`. `close` gives the file its end mark; what is written after it goes nowhere."""

    def __init__(self, path: Path, descriptor: int, failed: Callable[[], None]) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._failed = failed
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._deflate = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS)
        self._buffer = bytearray()

    @classmethod
    def open(cls, path: str, header: Header, failed: Callable[[], None] = lambda: None) -> StepLog:
        """A new file that begins with `header`; an older step log there is moved aside, its epoch in its name.

        Raises ConfigurationError when the path holds something else or cannot be written.
        """
        where = Path(path)
        try:
            if where.is_symlink() and not where.exists():
                raise ConfigurationError(
                    f"the step log {where} is a symbolic link to {where.readlink()}, which is not there: "
                    "remove the link or give another path"
                )
            if where.exists():
                move_aside(where)
            descriptor = os.open(where, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"the step log {where} cannot be written: {error.strerror}") from None
        step_log = cls(where, descriptor, failed)
        try:
            _write_whole(descriptor, OPENING)
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(f"the step log {where} cannot be written: {error.strerror}") from None
        step_log.write(header)
        step_log.flush()
        return step_log

    def write(self, record: Record) -> None:
        if self._descriptor is None:
            return
        buffer = self._buffer
        position = len(buffer)
        start = position + PREFIX.size
        buffer += _ROOM
        self._encode_into(record, buffer, start)
        length = len(buffer) - start
        with memoryview(buffer)[start:] as payload:
            check = zlib.crc32(payload)
        PREFIX.pack_into(buffer, position, length, checksum_of_length(length), check)

    def flush(self) -> None:
        if self._buffer:
            self._write_out(zlib.Z_SYNC_FLUSH)

    def close(self) -> None:
        self._write_out(zlib.Z_FINISH)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_out(self, mode: int) -> None:
        if self._descriptor is None:
            return
        data = self._deflate.compress(self._buffer) + self._deflate.flush(mode)
        self._buffer.clear()
        try:
            _write_whole(self._descriptor, data)
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = None
            log.error("step_log_failed path=%s error=%r: the engine goes on without its log", self.path, str(error))
            self._failed()


def _write_whole(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, data[written:])


def move_aside(path: Path) -> Path:
    """Renames a step log so that its header's epoch is part of its name. Raises ConfigurationError for another file."""
    if not path.is_file():
        raise ConfigurationError(f"the step log {path} is no regular file: give the path of a new file")
    try:
        with read(path) as old:
            epoch = str(old.header.epoch)
    except NotAStepLog as error:
        if error.is_beginning:
            epoch = "unknown"
        else:
            raise ConfigurationError(
                f"the step log {path} is a file of another kind, which kvyard does not overwrite: "
                "move it away or give another path"
            ) from None
    except StepLogError:
        epoch = "unknown"  # of another version, or damaged in its header
    for number in range(1_000_000):
        aside = path.with_name(f"{path.stem}.{epoch}{f'.{number}' if number else ''}{path.suffix}")
        try:
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # the name is ours
        except FileExistsError:
            continue
        os.replace(path, aside)
        return aside
    raise ConfigurationError(f"too many step logs named like {path}: move them away")
