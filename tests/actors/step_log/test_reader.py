"""What can become of a log's bytes: cut off anywhere, changed anywhere, something else altogether, very many."""

from __future__ import annotations

import os
import random
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import pytest

from actors.messages.plan import StepResult
from actors.scheduling.records import FORMAT_VERSION, Header, Record, StepApplied
from actors.step_log.format import MAGIC, DamagedStepLog, NotAStepLog, StepLogError, WrongVersion
from actors.step_log.reader import read
from actors.step_log.writer import StepLog
from tests.actors.step_log.logs import CONFIGURATION, header_of, records_of, run_at, write_run


def outcome(path: Path) -> tuple[list[Record], StepLogError | None, bool]:
    """What is read before the error, the error, and whether the log is truncated."""
    found: list[Record] = []
    try:
        log = read(path)
        found += log
    except StepLogError as error:
        return found, error, False
    return found, None, log.truncated


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = run_at(tmp_path / "log")
    log = read(tmp_path / "log")
    assert log.header == header_of()
    assert list(log) == written
    assert not log.truncated


def test_cut_off_at_any_byte_the_whole_records_before_are_read(tmp_path: Path) -> None:
    written = run_at(tmp_path / "log")
    numbers = []
    for length in reversed(range((tmp_path / "log").stat().st_size)):
        os.truncate(tmp_path / "log", length)
        found, error, truncated = outcome(tmp_path / "log")
        assert found == written[: len(found)]
        if error is None:
            assert truncated
        else:
            assert isinstance(error, NotAStepLog)
            assert error.is_beginning
        numbers.append(len(found))
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[0], numbers[-1]) == (len(written), 0)  # first only the end mark is missing
    assert set(numbers) >= {1, len(written) // 2, len(written) - 1}


def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    """A bit in a token must not pass as a token: the replay would blame the scheduler."""
    written = run_at(tmp_path / "log")
    whole = (tmp_path / "log").read_bytes()
    num_noticed = 0
    with (tmp_path / "log").open("r+b", buffering=0) as file:
        for place, value in enumerate(whole):
            for bit in (0, 3, 7):
                os.pwrite(file.fileno(), bytes([value ^ 1 << bit]), place)
                found, error, _ = outcome(tmp_path / "log")
                if error is None:  # a bit that means nothing: padding before a flush's empty block, or the end mark
                    assert found == written
                    continue
                assert found == written[: len(found)]
                assert error.offset <= place, (error, place)
                assert f"{tmp_path / 'log'}: " in str(error)
                num_noticed += 1
            os.pwrite(file.fileno(), bytes([value]), place)
    assert num_noticed > 0.9 * 3 * len(whole)


def test_bytes_behind_the_end_are_damage(tmp_path: Path) -> None:
    run_at(tmp_path / "log")
    size = (tmp_path / "log").stat().st_size
    with (tmp_path / "log").open("ab") as file:
        file.write(b"x" * 5000)
    with pytest.raises(DamagedStepLog) as raised:
        records_of(tmp_path / "log")
    assert raised.value.offset <= size


def test_two_logs_in_one_file_are_none(tmp_path: Path) -> None:
    written = run_at(tmp_path / "log")
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(whole + whole)
    with pytest.raises(DamagedStepLog, match="two logs in one file: the other begins here") as raised:
        records_of(tmp_path / "log")
    assert raised.value.offset == len(whole)
    (tmp_path / "log").unlink()
    step_log = StepLog.open(str(tmp_path / "log"), header_of())
    write_run(step_log)
    step_log.write(header_of(epoch=8))
    write_run(step_log)
    step_log.close()
    found, error, _ = outcome(tmp_path / "log")
    assert found == written
    assert isinstance(error, DamagedStepLog)
    assert "two logs in one file: another header at this byte or within 4096 bytes" in str(error)
    assert error.offset <= len(whole)


def test_a_whole_record_with_an_impossible_value_names_the_value(tmp_path: Path) -> None:
    none = msgspec.structs.replace(CONFIGURATION, usable_blocks=0)
    StepLog.open(str(tmp_path / "log"), header_of(configuration=none)).close()
    with pytest.raises(
        DamagedStepLog, match=r"a record is whole, but impossible, .*`int` >= 1 - at `\$.*usable_blocks`"
    ):
        read(tmp_path / "log")


def test_an_error_in_a_long_log_names_a_byte_near_the_damage(tmp_path: Path) -> None:
    run_at(tmp_path / "log", steps=900)
    data = bytearray((tmp_path / "log").read_bytes())
    assert len(data) > 20_000
    for place in range(15_000, 15_004):  # a single one may be the padding before a flush, which says nothing
        data[place] ^= 0x10
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(DamagedStepLog) as raised:
        records_of(tmp_path / "log")
    assert 15_000 - 2 * 4096 <= raised.value.offset <= 15_000


@pytest.mark.parametrize("content", [b"\x89PNG\r\n", b'{"model": 1}', b"KVYARD", b"\0" * 100])
def test_something_else_is_no_step_log(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(NotAStepLog, match="not a step log") as raised:
        read(tmp_path / "log")
    assert (raised.value.offset, raised.value.is_beginning) == (0, False)


def test_another_version_says_which(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(MAGIC + bytes([FORMAT_VERSION + 1]) + b"whatever comes then")
    with pytest.raises(WrongVersion, match=f"format {FORMAT_VERSION + 1}, this kvyard reads {FORMAT_VERSION}"):
        read(tmp_path / "log")


def test_a_log_that_does_not_begin_with_a_header_is_none(tmp_path: Path) -> None:
    log = StepLog.open(str(tmp_path / "log"), header_of())
    log.close()
    header_only = (tmp_path / "log").read_bytes()
    assert [type(record) for record in records_of(tmp_path / "log")] == [Header]
    (tmp_path / "log").write_bytes(header_only[:8] + zlib.compress(b"", 1, wbits=-15))
    with pytest.raises(NotAStepLog, match="before its header was whole"):
        read(tmp_path / "log")


def test_a_long_log_is_not_held_in_memory(tmp_path: Path) -> None:
    """40 MB of records, whose bytes do not compress; the reader holds one record and one piece."""
    step_log = StepLog.open(str(tmp_path / "log"), header_of())
    source = random.Random(1)
    for number in range(200):
        step_log.write(StepApplied(1.0, StepResult(number, b"", source.randbytes(200_000))))
        step_log.flush()
    step_log.close()
    tracemalloc.start()
    try:
        count = sum(1 for _ in read(tmp_path / "log"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 201
    assert peak < 2 << 20, peak
