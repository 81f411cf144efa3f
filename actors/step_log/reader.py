"""Reads a step log record by record, holding no more than one piece of the file.

A log that ends in the middle of a record, or without its end mark, is no error: its engine was killed, still runs, or
could not write any more. `truncated` says so once the iteration has ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from actors.scheduling.records import FORMAT_VERSION, Header, Record
from actors.step_log.format import (
    MAGIC,
    OPENING,
    PREFIX,
    DamagedStepLog,
    NotAStepLog,
    WrongVersion,
    checksum_of_length,
)

# Bytes of the file read at once: the precision of an error's offset, and at most 1,032 times that much is inflated.
PIECE = 4096
_decode = msgspec.msgpack.Decoder(Record).decode
_NO_HEADER = "empty, or cut off before its header was whole"


def read(path: str | Path) -> StepLogReader:
    """Raises OSError, NotAStepLog, WrongVersion or DamagedStepLog; the last also while iterating."""
    return StepLogReader(Path(path))


class StepLogReader(Iterator[Record]):
    """Gives every whole record, first the one header. The file is open until the iteration ends or `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated = True  # until the end mark was seen
        self._file = path.open("rb")
        try:
            self._check_opening(self._file.read(len(OPENING)))
            self._records = self._read_all()
            header = next(self._records, None)
            if not isinstance(header, Header):
                raise NotAStepLog(path, len(OPENING), _NO_HEADER, is_beginning=header is None)
            if header.format_version != FORMAT_VERSION:
                raise WrongVersion(path, header.format_version)
        except BaseException:
            self.close()
            raise
        self.header = header
        self._begun = False

    def __next__(self) -> Record:
        if not self._begun:
            self._begun = True
            return self.header
        return next(self._records)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> StepLogReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_opening(self, opening: bytes) -> None:
        if opening == OPENING:
            return
        if OPENING.startswith(opening):
            raise NotAStepLog(self.path, 0, _NO_HEADER, is_beginning=True)
        if not opening.startswith(MAGIC):
            raise NotAStepLog(self.path, 0, "not a step log", is_beginning=False)
        raise WrongVersion(self.path, opening[len(MAGIC)])

    def _read_all(self) -> Iterator[Record]:
        inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
        pending = bytearray()
        is_first = True
        offset = began = len(OPENING)  # of the file: of this piece; of the piece in which the pending record begins
        with self._file:
            while piece := self._file.read(PIECE):
                if inflate.eof:
                    break
                try:
                    pending += inflate.decompress(piece)
                    position = 0
                    while (end := _end_of_record(pending, position)) is not None:
                        record = _decode(memoryview(pending)[position + PREFIX.size : end].toreadonly())
                        if isinstance(record, Header) and not is_first:
                            text = f"another header at this byte or within {offset + PIECE - began} bytes after it"
                            raise DamagedStepLog(self.path, began, f"two logs in one file: {text}")
                        yield record
                        position, began, is_first = end, offset, False
                except (zlib.error, _Damage, msgspec.DecodeError) as error:
                    where = f"at this byte or within {offset + PIECE - began} bytes after it: {error}"
                    is_whole = isinstance(error, msgspec.ValidationError)  # its checksums are right
                    text = "a record is whole, but impossible," if is_whole else "the log is damaged"
                    raise DamagedStepLog(self.path, began, f"{text} {where}") from None
                del pending[:position]
                offset += len(piece)
            if inflate.unused_data:
                rest = inflate.unused_data
                if rest[: len(MAGIC)] == MAGIC[: len(rest)]:
                    text = "two logs in one file: the other begins here"
                    raise DamagedStepLog(self.path, offset - len(rest), text)
                raise DamagedStepLog(self.path, began, "bytes follow the end of the log")
            if inflate.eof and pending:
                raise DamagedStepLog(self.path, began, "the log ends in the middle of a record")
            self.truncated = not inflate.eof


class _Damage(Exception):
    pass


def _end_of_record(pending: bytearray, position: int) -> int | None:
    """Where the record that begins at `position` ends; None: not all of it is here yet."""
    start = position + PREFIX.size
    if start > len(pending):
        return None
    length, length_check, payload_check = PREFIX.unpack_from(pending, position)
    if checksum_of_length(length) != length_check:
        raise _Damage("a record's length does not match its checksum")
    if start + length > len(pending):
        return None
    with memoryview(pending)[start : start + length] as payload:
        if zlib.crc32(payload) != payload_check:
            raise _Damage("a record does not match its checksum")
    return int(start + length)
