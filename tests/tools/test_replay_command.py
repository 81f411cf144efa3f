"""`kvyard replay` as a user runs it: the one line, the state at a step, the difference, and what is no log."""

from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner

from actors.messages.plan import StepResult
from actors.scheduling.orders import int32
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import Planned, Record, RequestNote, StepApplied
from actors.step_log.writer import StepLog
from tests.scheduling.builders import request_of, result_of, ticket_of
from tests.scheduling.recorded_runs import SMALL, header_of
from tools.replay import replay
from tools.steps import steps


def write(path: Path, records: list[Record]) -> None:
    step_log = StepLog.open(str(path), header_of(SMALL))
    for record in records:
        step_log.write(record)
        step_log.flush()
    step_log.close()


def a_run() -> list[Record]:
    """Steps at 1, 2 and 3 s: r0 and r1 in steps 1 and 2, r2 waits for blocks, remote for its load; no result of 3."""
    records: list[Record] = [RequestNote("r0", 0.25)]
    core = RecordedCore(SMALL, records.append)
    core.add(request_of("remote", 6, ticket=ticket_of(6), arrival=0.5), 0.5)
    for number in range(3):
        core.add(request_of(f"r{number}", 11, first=100 * number, arrival=0.5), 0.5)
    for now in (1.0, 2.0, 3.0):
        plan = core.schedule(now)
        core.take_effects()
        if now < 3.0:
            core.apply(result_of(plan), now + 0.5)
    return records


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(replay, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_an_identical_replay_is_one_line_of_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write(log, a_run())
    # Inputs: 4 requests, 2 results, and 3 times effects were taken: the ticket's, and tokens.
    says = "identical: 3 steps, 9 inputs, 4 requests, 3.000 s"
    assert run(str(log)) == (0, f"{log}: {says}; whole\n", "")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 2)
    assert run(str(log)) == (0, f"{log}: {says}; without its end\n", "")


def test_until_shows_the_state_after_that_step_was_planned(tmp_path: Path) -> None:
    write(tmp_path / "log", a_run())
    code, out, _ = run(str(tmp_path / "log"), "--until", "2")
    assert code == 0
    assert out == (
        "both-0 epoch 1: step 2 at 2.000 s\n"
        "\n"
        "running: 2\n"
        "  r0 RUNNING: 12 computed of 12 known, 0 drafts, 0 placeholders, 3 blocks [3, 4, 5]; decode for 0.500 s\n"
        "  r1 RUNNING: 12 computed of 12 known, 0 drafts, 0 placeholders, 3 blocks [6, 7, 8]; decode for 0.500 s\n"
        "waiting: 1\n"
        "  r2 WAITING: 0 computed of 11 known, 0 drafts, 0 placeholders, 0 blocks [];"
        " queued for 1.500 s (needs 3 blocks, 0 free)\n"
        "skipped_waiting: 1\n"
        "  remote WAITING_FOR_REMOTE_KVS: 6 computed of 6 known, 0 drafts, 0 placeholders, 2 blocks [1, 2];"
        " waiting_for_remote_kvs for 1.000 s (loads 6 tokens into 2 blocks)\n"
        "blocks: 8 usable = 0 free + 8 held + 0 fenced + 0 leased + 0 quarantined\n"
        "  remote generation 1: 2 held for 1.000 s (waiting_for_remote_kvs)\n"
        "  r0 generation 2: 3 held for 1.000 s (decode)\n"
        "  r1 generation 3: 3 held for 1.000 s (decode)\n"
        "in flight: 1 steps\n"
        "  step 2: 2 requests, 2 tokens\n"
    )


def test_until_beyond_the_log_says_where_it_ends(tmp_path: Path) -> None:
    write(tmp_path / "log", a_run())
    code, out, error = run(str(tmp_path / "log"), "--until", "99")
    assert (code, out) == (1, "")
    assert error == f"{tmp_path / 'log'}: step 99 is not in the log; its last is 3\n"
    assert run(str(tmp_path / "log"), "--until", "0")[1].startswith("both-0 epoch 1: step 0 at 0.000 s\n")


def test_a_difference_is_named_and_exits_with_1(tmp_path: Path) -> None:
    records = a_run()
    place = max(number for number, record in enumerate(records) if isinstance(record, Planned))
    del records[place - 1]  # the result of step 2
    write(tmp_path / "log", records)
    code, out, error = run(str(tmp_path / "log"))
    assert (code, out) == (1, "")
    assert error.startswith(f"{tmp_path / 'log'}: record {place}: step 3 differs: request_ids, row 0: ")
    assert run(str(tmp_path / "log"), "--until", "2")[0] == 0


def test_a_core_that_raises_says_whether_the_recorded_one_did(tmp_path: Path) -> None:
    records = a_run()
    records.append(StepApplied(4.0, StepResult(3, int32([1, 1, 1]), int32([7, 7, 7]))))
    write(tmp_path / "log", records)
    code, _, error = run(str(tmp_path / "log"))
    assert code == 1
    assert "after step 3: the core raised ValueError: step 3 has 1 rows, its result 3; the log ends here" in error
    write(tmp_path / "other", [*records, records[-1]])
    assert run(str(tmp_path / "other"))[2].endswith("its result 3; the recorded run went on\n")


def test_what_is_no_whole_step_log_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no log")
    assert run(str(tmp_path / "text")) == (2, "", f"kvyard replay: {tmp_path}/text: not a step log (byte 0)\n")
    write(tmp_path / "log", a_run())
    data = bytearray((tmp_path / "log").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "log").write_bytes(data)
    code, out, error = run(str(tmp_path / "log"))
    assert (code, out) == (2, "")
    assert "the log is damaged at this byte or within" in error
    assert run(str(tmp_path / "missing"))[0] == 2


def test_a_configuration_that_no_core_can_have_exits_with_2(tmp_path: Path) -> None:
    """Its bytes are well: their checksums are right."""
    log = str(tmp_path / "log")
    StepLog.open(log, header_of(msgspec.structs.replace(SMALL, watermark=5.0))).close()
    says = "the configuration in its header is impossible: watermark 5.0 is not a fraction: give 0 or more, below 1"
    assert run(log) == (2, "", f"kvyard replay: {log}: {says}\n")
    for flags in ([], ["--json"]):
        result = CliRunner().invoke(steps, ["--log", log, *flags])
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"kvyard steps: {log}: {says}\n")
