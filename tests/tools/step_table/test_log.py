"""`kvyard steps --log` as a user runs it: the table of a log, the way of one request, and what is not to be shown."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.messages.plan import StepPlan
from actors.messages.transfer import BlocksSent, GrantLease, LeaseGranted
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import EffectsTaken, Header, Planned, Record, RequestNote, StepNote
from actors.step_log.reader import read
from tests.scheduling.builders import request_of, result_of, ticket_of
from tests.scheduling.recorded_runs import random_run
from tests.tools.step_table.logs import CONFIG, normal, run, two_requests, with_stages, write
from tools.step_table.log import WatchedReplay, steps_of_log
from tools.step_table.timeline import Follower
from tools.step_table.timeline_text import ranges


def test_the_table_of_a_log(tmp_path: Path) -> None:
    code, out, error = run("--log", str(write(tmp_path / "log", two_requests())))
    assert (code, error) == (0, "")
    lines = [normal(line) for line in out.splitlines()]
    assert lines[0].startswith("both-0 (role both, epoch 1): async depth 1, 6 blocks of 4 tokens;")
    assert lines[2:] == [
        "before the first step",
        "+0.500000 add first",
        "+0.750000 add second",
        "step 1: 9 of 8192 tokens, 1 request, free blocks 6 → 1, schedule 1.00 ms, execute 6.00, sample 1.00",
        "+1.000000 plan: 1 row; new first; loading second",
        "+1.011000 result of step 1",
        "+1.500000 second landed (4,096 bytes in 250.0 ms)",
        "1 first running RUNNING 0→9 9 9 +3 3 added; new; out 7",
        "1 second skipped WAITING_FOR_REMOTE_KVS 0→8 9 8 +2 2 added; loading; landed (4,096 bytes in 250.0 ms); "
        "waits: loads 8 tokens into 2 blocks",
        "step 2: 2 of 8192 tokens, 2 requests, free blocks 1 → 0, schedule 1.00 ms, execute 6.00, sample 1.00",
        "+2.000000 plan: 2 rows; new second",
        "+2.011000 result of step 2",
        "2 first running RUNNING 9→10 10 1 3 out 7",
        "2 second running RUNNING 8→9 9 1 +1 3 new; out 7",
        "step 3: 2 of 8192 tokens, 2 requests, free blocks 0 → 6, schedule 1.00 ms, execute 6.00, sample 1.00",
        "+3.000000 plan: 2 rows",
        "+3.011000 result of step 3; first finished: length; second finished: length",
        "3 first – FINISHED 10→11 11 1 −3 0 finished: length; out 7",
        "3 second – FINISHED 9→10 10 1 −3 0 finished: length; out 7",
        "no step: nothing to compute, free blocks 6 → 6",
        "+4.000000 plan without rows",
    ]


def test_the_way_of_one_request_from_http_to_token(tmp_path: Path) -> None:
    log = write(tmp_path / "log", two_requests())
    code, out, error = run("--log", str(log), "--request", "sec")
    assert (code, error) == (0, "")
    lines = [normal(line) for line in out.splitlines()]
    assert lines[0] == "request second in both-0 (epoch 1)"
    # From 0.5 s, where it arrived, to 3.013 s, where step 3 was published.
    assert lines[1] == "9 prompt tokens, 2 tokens out (max_tokens 2); arrived +0.500000 s; 2513.000 ms"
    assert lines[4:] == [
        "0.000 125.000 API arrival → submitted",
        "125.000 125.000 admission submitted → added",
        "250.000 250.000 waiting until the next plan",
        "500.000 500.000 waiting loads 8 tokens into 2 blocks",
        "1000.000 500.000 waiting landed (4,096 bytes in 250.0 ms): until the next plan",
        # Blocks 1 to 3 are first's, 4 and 5 were loaded into, 6 is new: position 8 is its first slot.
        "1500.000 13.000 step 2 1.000 3.000 6.000 1.000 2.000",
        "tokens [1] of [2] in 2 rows; positions 8; block table [3] (whole, with all tokens); samples 1 (2 rows sample)",
        "slots 24 (block_id · 4 + offset)",
        "computed 8 → 9 of 9; blocks +1 −0; new; out 7",
        "1513.000 987.000 between",
        "2500.000 13.000 step 3 1.000 3.000 6.000 1.000 2.000",
        "tokens [1] of [2] in 2 rows; positions 9; block table [3]; samples 1 (2 rows sample)",
        "slots 25 (block_id · 4 + offset)",
        "computed 9 → 10 of 10; blocks +0 −3; finished: length; out 7",
        "",
        "API 125.000 + admission 125.000 + waiting 1250.000 + between 987.000 + schedule 2.000 + hand-over 6.000"
        " + execute 12.000 + sample 2.000 + publish 4.000",
        "total 2513.000 ms; wall time, arrival to end, 2513.000 ms; difference 0.000 ms",
    ]
    first = run("--log", str(log), "--request", "first")[1]
    assert "slots 4–12 (block_id · 4 + offset)" in first  # 9 tokens in blocks 1, 2, 3


def asynchronous(path: Path) -> Path:
    """Depth 2: plan k+1 is 1 ms after plan k, results 10 ms after their plan; the last step never comes back."""
    config = msgspec.structs.replace(CONFIG, async_scheduling=True, usable_blocks=20)
    records: list[Record] = []
    core = RecordedCore(config, records.append)
    records.append(RequestNote("one", 0.0))
    core.add(request_of("one", 4, max_tokens=50), 0.0)
    plans: list[StepPlan] = [core.schedule(0.0)]
    for number in range(1, 6):
        now = number * 0.01
        plans.append(core.schedule(now - 0.009))
        core.apply(with_stages(result_of(plans[number - 1])), now)
        core.take_effects()
        records.append(StepNote(number, 0.0005, now - 0.0185 if number > 1 else 0.0005, now, now + 0.0005))
    return write(path, records, config)


def test_async_steps_overlap_and_the_sum_is_still_the_wall_time(tmp_path: Path) -> None:
    code, out, _ = run("--log", str(asynchronous(tmp_path / "log")), "--request", "one")
    assert code == 0
    # Arrived at 0; the result of step 5 came at 50 ms and was published half a millisecond later.
    assert "total 50.500 ms; wall time, arrival to end, 50.500 ms; difference 0.000 ms" in out
    overlap = float(re.findall(r"− overlap ([\d.]+)", out)[0])
    # Steps 2 to 5 were planned at 1, 11, 21, 31 ms; those before them were published at 10.5, 20.5, 30.5, 40.5 ms.
    assert overlap == pytest.approx(4 * 9.5)
    assert "step 6 IN FLIGHT: its result never came" in out
    table = run("--log", str(tmp_path / "log"))[1]
    assert "step 6: 1 of 8192 tokens, 1 request, free blocks 18 → 17, IN FLIGHT: its result never came" in table


def test_of_a_random_run_every_request_adds_up(tmp_path: Path) -> None:
    """Aborts, deadlines, failed loads, preemptions, adapters, two steps in flight; no notes in the log."""
    random_run(tmp_path / "log", 3)
    held, out, ended = Counter[str](), Counter[str](), set[str]()
    numbers: list[int] = []
    with read(tmp_path / "log") as log:
        replay = WatchedReplay(log)
        for step in steps_of_log(replay):
            numbers += [step.number] * step.has_rows
            for row in step.rows.values():
                held[row.request_id] += row.blocks_allocated - row.blocks_freed
                out[row.request_id] += len(row.token_ids)
                ended |= {row.request_id} if row.status == "FINISHED" else set()
    assert numbers == list(range(1, len(numbers) + 1))
    assert +held == +_held(replay)
    assert sum(out.values()) > 500
    events = ("aborted", "deadline", "preempted", "load failed", "came back for nothing")
    text = run("--log", str(tmp_path / "log"), "--all")[1]
    assert all(event in text for event in events)
    for name in sorted(ended)[::20]:
        with read(tmp_path / "log") as log:
            replay = WatchedReplay(log, only=name)
            follower = Follower(name, replay.core)
            for record in replay.records():
                follower.take(record)
                replay.collector.take()
        (life,) = follower.lives()
        assert life.ended is not None
        assert sum(span.seconds for span in life.spans()) == pytest.approx(life.end - life.request.arrival)
        assert sum(len(own.row.token_ids) for own in life.steps) == out[name]
        for own in life.steps:
            assert len(own.shapes.slots) == len(set(own.shapes.slots)) == own.row.num_scheduled_tokens


def _held(replay: WatchedReplay) -> Counter[str]:
    held = Counter[str]()
    for grant in replay.core.blocks_report(0.0).grants:
        held[grant.request_id] += grant.blocks
    return held


def test_from_and_to_show_the_same_rows_as_the_whole(tmp_path: Path) -> None:
    random_run(tmp_path / "log", 3)

    def rows(*flags: str) -> list[Any]:
        code, out, _ = run("--log", str(tmp_path / "log"), "--json", *flags)
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]

    whole = [row for row in rows() if row["step"] is not None and 100 <= row["step"] <= 110]
    part = [row for row in rows("--from", "100", "--to", "110") if row["step"] is not None]
    for row in whole + part:
        row["events"] = [event for event in row["events"] if event != "added"]  # perhaps before step 100
    assert part == whole
    assert {row["step"] for row in part} == set(range(100, 111))


def test_who_waits_as_before_is_only_counted(tmp_path: Path) -> None:
    records: list[Record] = []
    core = RecordedCore(CONFIG, records.append)
    for name in ("first", "second"):
        core.add(request_of(name, 20, first=100 * len(name), max_tokens=4), 0.5)
    for now in (1.0, 2.0, 3.0):
        core.apply(result_of(core.schedule(now)), now)
    log = str(write(tmp_path / "log", records))
    assert run("--log", log)[1].count("needs 5 blocks, 1 free") == 1
    assert run("--log", log)[1].count("… and 1 more as in their rows before") == 1
    assert run("--log", log, "--all")[1].count("… and") == 0


def test_a_log_that_is_not_held_in_memory(tmp_path: Path) -> None:
    """Never more steps at once than are in flight, and the one that the next plan ends."""
    random_run(tmp_path / "log", 1)
    with read(tmp_path / "log") as log:
        replay = WatchedReplay(log)
        most = 0
        for _ in replay.records():
            most = max(most, len(replay.collector._open))
            replay.collector.take()
    assert 2 <= most <= 4


def test_a_replay_that_differs_ends_the_table_there(tmp_path: Path) -> None:
    records = two_requests()
    place = next(at for at, record in enumerate(records) if isinstance(record, Planned) and record.plan.step == 2)
    del records[place - 1]  # the report that the load has landed
    log = str(write(tmp_path / "log", records))
    for flags in ([], ["--request", "first"]):
        code, out, error = run("--log", log, *flags)
        assert code == 1
        assert "step 1" in out
        assert f"record {place}, after step 1: step 2 differs: request_ids, row 1: second is only recorded" in error


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    log = str(write(tmp_path / "log", two_requests()))
    scenario = tmp_path / "scenario.json"
    scenario.write_text('{"requests": {}, "actions": []}')
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    no_steps = str(write(tmp_path / "no-steps", []))
    assert run(log) == (2, "", f"{log}: a step log, not a scenario: use --log {log}\n")
    assert run("--log", str(empty))[::2] == (
        2,
        f"kvyard steps: {empty}: empty, or cut off before its header was whole (byte 0)\n",
    )
    assert run("--log", str(scenario))[::2] == (2, f"kvyard steps: {scenario}: not a step log (byte 0)\n")
    assert run("--log", no_steps) == (0, f"{no_steps}: no step was planned\n", "")
    assert run("--log", no_steps, "--json") == (0, "", f"{no_steps}: no step was planned\n")
    for flags in ([], ["--json"], ["--all"], ["--to", "10"]):
        late = run("--log", log, "--from", "9", *flags)
        assert late == (2, "", f"kvyard steps: {log}: no step from 9 on; the last is 3\n")
    missing = run("--log", log, "--request", "third")
    assert missing == (2, "", f"kvyard steps: {log}: no request's id or X-Request-ID is or begins with 'third'\n")
    ambiguous = run("--log", log, "--request", "")
    assert ambiguous == (2, "", f"kvyard steps: {log}: '' is the beginning of 2 ids: first, second\n")
    for flags, says in (
        ([str(scenario), "--log", log], "give either a scenario FILE or --log LOG, not both"),
        ([], "give a scenario FILE, or --log LOG"),
        (["--log", log, "--check"], "`kvyard replay LOG` checks a step log"),
        ([str(scenario), "--request", "a"], "give it with --log"),
        (["--log", log, "--request", "first", "--to", "3"], "give it alone"),
        (["--log", log, "--from", "3", "--to", "2"], "--to 2 is before --from 3"),
    ):
        code, out, error = run(*flags)
        assert (code, out) == (2, "")
        assert says in error


def leased(path: Path, *, plans_while_granting: bool) -> str:
    """A prefill engine's request of 4 tokens with two steps in flight: its blocks are sent."""
    config = msgspec.structs.replace(CONFIG, async_scheduling=True)
    records: list[Record] = []
    core = RecordedCore(config, records.append)
    core.add(request_of("one", 4, max_tokens=1, do_remote_decode=True), 0.0)
    plan = core.schedule(0.0)
    assert core.schedule(0.001).request_ids == ()
    core.apply(result_of(plan), 0.01)
    (order,) = [effect for effect in core.take_effects() if isinstance(effect, GrantLease)]
    if plans_while_granting:
        assert core.schedule(0.011).request_ids == ()
    core.apply(LeaseGranted("one", order.generation, ticket_of(4)), 0.02)
    core.apply(BlocksSent("one", order.generation), 0.03)
    core.take_effects()
    return str(write(path, records, config))


def test_a_request_that_has_ended_waits_for_nothing(tmp_path: Path) -> None:
    """The plan of its last row still had a placeholder and a reason; then its lease was granted, which ended it."""
    code, out, _ = run("--log", leased(tmp_path / "log", plans_while_granting=False))
    assert code == 0
    # 4 tokens of the prompt and the one that came out; nothing more is on its way.
    assert normal(out.splitlines()[-1]) == "– one – FINISHED 4 5 −1 0 lease granted; finished: length; sent"
    out = run("--log", leased(tmp_path / "other", plans_while_granting=True))[1]
    assert normal(out.splitlines()[-1]) == "– one – FINISHED 4 5 −1 0 lease granted; finished: length; sent"
    rows = [normal(line) for line in out.splitlines() if " RUNNING " in line]
    assert rows[1] == "– one running RUNNING 4 4+1p 1 waits: the steps in flight bring it to max_tokens"


def test_what_is_asked_for_a_lease_is_not_said_to_wait(tmp_path: Path) -> None:
    log = Path(leased(tmp_path / "log", plans_while_granting=True))
    with read(log) as records:
        kept = [record for record in records if not isinstance(record, Header | EffectsTaken)]
    config = msgspec.structs.replace(CONFIG, async_scheduling=True)
    granting = write(tmp_path / "granting", kept[: kept.index(_last_plan(kept)) + 1], config)
    out = run("--log", str(granting))[1]
    assert normal(out.splitlines()[-1]) == "– one – FINISHED 4 5 1 its lease is being asked for"


def _last_plan(records: list[Record]) -> Record:
    return [record for record in records if isinstance(record, Planned)][-1]


def test_a_log_without_its_end_is_shown_and_says_so(tmp_path: Path) -> None:
    log = write(tmp_path / "log", two_requests(), whole=False)
    code, out, error = run("--log", str(log))
    assert (code, error) == (0, f"{log}: the log has no end: its engine was killed, or still runs\n")
    assert "3 second" in normal(out)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    code, _, error = run("--log", str(log))
    assert code == 2
    assert "the log is damaged at this byte or within" in error


def test_runs_of_slots() -> None:
    assert ranges([4, 5, 6, 9, 12, 13]) == "4–6, 9, 12–13"
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, … 12 more runs"
