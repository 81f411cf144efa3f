"""The file: whose it is, what becomes of an older one, what survives a kill, and a disk that is full."""

from __future__ import annotations

import logging
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from actors.messages.errors import ConfigurationError
from actors.scheduling.records import FORMAT_VERSION, Header, StepNote
from actors.step_log.format import MAGIC
from actors.step_log.reader import read
from actors.step_log.writer import StepLog
from tests.actors.step_log.logs import header_of, records_of, run_at, write_run

ROOT = Path(__file__).parents[3]


def open_at(path: Path, epoch: int = 7) -> StepLog:
    return StepLog.open(str(path), header_of(epoch=epoch))


def epoch_of(path: Path) -> int:
    with read(path) as log:
        return log.header.epoch


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_at(tmp_path / "log").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_each_flush_is_one_write_and_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_log = open_at(tmp_path / "log")
    writes: list[int] = []
    write = os.write

    def counted(descriptor: int, data: bytes) -> int:
        writes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    written = write_run(step_log, steps=5)
    assert len(writes) == 5
    step_log.flush()
    assert len(writes) == 5, "nothing is written when there is nothing to write"
    assert records_of(tmp_path / "log") == [header_of(), *written]


def test_an_older_log_is_moved_aside_under_its_epoch_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.steplog"
    for epoch in (3, 3, 3, 8):
        open_at(path, epoch).close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "decode-0.3.1.steplog",
        "decode-0.3.2.steplog",
        "decode-0.3.steplog",
        "decode-0.steplog",
    ]
    assert epoch_of(path) == 8
    assert {epoch_of(entry) for entry in tmp_path.iterdir() if entry != path} == {3}


def test_one_without_a_whole_header_is_moved_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for content in (b"", MAGIC[:3], MAGIC + bytes([FORMAT_VERSION + 1]) + b"of the future"):
        path.write_bytes(content)
        open_at(path).close()
    assert (tmp_path / "log.unknown").read_bytes() == b""
    assert (tmp_path / "log.unknown.1").read_bytes() == MAGIC[:3]
    assert (tmp_path / "log.unknown.2").read_bytes().endswith(b"of the future")


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("chapter one")
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/thesis is a file of another kind.*give another path"):
        open_at(tmp_path / "thesis")
    assert (tmp_path / "thesis").read_text() == "chapter one"
    with pytest.raises(ConfigurationError, match=f"{tmp_path} is no regular file"):
        open_at(tmp_path)
    with pytest.raises(ConfigurationError, match="/dev/null is no regular file"):
        open_at(Path("/dev/null"))


def test_a_link_to_nothing_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("elsewhere")
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/log is a symbolic link to elsewhere, which is not there"):
        open_at(tmp_path / "log")
    assert (tmp_path / "log").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{tmp_path}/missing/log cannot be written: No such file or directory"
    ):
        open_at(tmp_path / "missing" / "log")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/file/log cannot be written: Not a directory"):
        open_at(tmp_path / "file" / "log")
    with pytest.raises(ConfigurationError, match="/proc/log cannot be written: "):
        open_at(Path("/proc/log"))


def test_after_kill_9_all_that_was_flushed_is_read(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.actors.step_log.endless", str(tmp_path / "log")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    said = [int(child.stdout.readline()) for _ in range(400)]
    child.send_signal(signal.SIGKILL)
    said += [int(line) for line in child.stdout.read().split()]
    child.wait()
    child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    log = read(tmp_path / "log")
    header, *notes = list(log)
    assert isinstance(header, Header)
    assert log.truncated
    numbers = [note.step for note in notes if isinstance(note, StepNote)]
    assert len(numbers) == len(notes)
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= said[-1] >= 400


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the file's size does what a full disk does: a write that takes a part, then one that takes nothing."""
    failures: list[str] = []
    step_log = StepLog.open(str(tmp_path / "log"), header_of(), lambda: failures.append("failed"))
    written = write_run(step_log, steps=3)
    size = (tmp_path / "log").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with caplog.at_level(logging.ERROR):
            for number in range(100):
                step_log.write(StepNote(number, 0.1, 0.2, 0.3, 0.4))
            step_log.flush()
            write_run(step_log, steps=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    step_log.close()
    assert failures == ["failed"]
    (line,) = caplog.messages
    assert line.startswith(f"step_log_failed path={tmp_path / 'log'} error='[Errno 27] File too large'")
    assert (tmp_path / "log").stat().st_size == size + 20, "the part that fitted is there"
    log = read(tmp_path / "log")
    found = list(log)
    assert found[: len(written) + 1] == [header_of(), *written]
    assert log.truncated


def test_after_close_nothing_is_written(tmp_path: Path) -> None:
    written = run_at(tmp_path / "other")
    step_log = open_at(tmp_path / "log")
    assert write_run(step_log) == written[1:]
    step_log.close()
    write_run(step_log)
    step_log.close()
    assert records_of(tmp_path / "log") == written
    assert (tmp_path / "log").read_bytes() == (tmp_path / "other").read_bytes()
