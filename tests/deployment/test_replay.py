"""The step logs of a real prefill/decode run, with everything in it that a scheduler may meet, replay to the byte.

A small pool preempts, damaged blocks fail loads, clients leave, and the decode engine is killed in the middle of a
stream: its log is read up to the last whole record, and stands aside when the engine is back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio

from actors.messages.transfer import BlocksLanded, LeaseGranted, TransferFailed
from actors.scheduling.records import Aborted, Added, Record, ReportApplied, RequestNote, StepNote
from actors.scheduling.replay import Replay
from actors.step_log.reader import read
from tests.deployment.clients import Question, ask, expected, in_background, prompt_of
from tests.deployment.exactness import ask_all_exactly, up_to
from tests.deployment.harness import ROOT, Deployment

FLAGS = (
    "--dtype=float32",
    "--transport=tcp",
    "--kv-memory=20MiB",  # 28 blocks hold 448 tokens; the 13 prompts have about 1,300 with their answers
    "--max-model-len=512",
    "--fault=corrupt:0.3,seed:5",
)


class Left(Exception):
    """The client goes away."""


def leave_after(deployment: Deployment, events: int) -> None:
    heard = 0

    def hear() -> None:
        nonlocal heard
        heard += 1
        if heard == events:
            raise Left

    try:
        ask(deployment.url, Question(prompt_of("prose-48"), 64, stream=True), hear)
    except Left:
        return
    raise AssertionError("the answer was over before the client could leave")


def replay(log: Path) -> tuple[int, str]:
    # Another hash seed than the engines', which run with a random one.
    result = subprocess.run(
        [sys.executable, "-m", "tools.cli", "replay", str(log)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return result.returncode, result.stdout + result.stderr


def followed(log: Path, request_id: str) -> list[str]:
    """The lines of `kvyard steps --log LOG --request ID`."""
    result = subprocess.run(
        [sys.executable, "-m", "tools.cli", "steps", "--log", str(log), "--request", request_id],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def both_logs_know(trace_id: str, prefill: Path, decode: Path) -> None:
    """Each engine has an id of its own for the request; what the client calls it stands in both logs."""
    first, second = (followed(log, trace_id)[0].split() for log in (prefill, decode))
    assert first[2:5] == second[2:5] == ["(X-Request-ID", f"{trace_id})", "in"]
    assert (first[5], second[5]) == ("prefill-0", "decode-0")
    assert first[1] != second[1]


def every_stage_is_shown(*logs: Path) -> None:
    """The first request of each log, from HTTP to token."""
    for log in logs:
        with read(log) as records:
            added = next(record for record in records if isinstance(record, Added))
        lines = followed(log, added.request.request_id)
        assert any(line.endswith("arrival → submitted") for line in lines)
        assert any(line.endswith("submitted → added") for line in lines)
        assert sum(" slots " in line for line in lines) >= 2  # of so many steps
        stages = ("API", "admission", "waiting", "schedule", "hand-over", "execute", "sample", "publish")
        total = next(place for place, line in enumerate(lines) if line.startswith("total "))
        assert all(f"{stage} " in lines[total - 1] for stage in stages)
        assert float(lines[total].split("difference ")[1].split()[0]) <= 0.001  # ms


def kinds_in(records: list[Record]) -> set[type[Any]]:
    return {type(record.report if isinstance(record, ReportApplied) else record) for record in records}


async def test_the_logs_of_a_run_with_all_that_can_happen_replay(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with Deployment(*FLAGS, f"--step-log={folder}") as running:
        before = running.engine("decode-0")
        await ask_all_exactly(running.url, up_to(129), 64)
        for events in (1, 3):
            await anyio.to_thread.run_sync(leave_after, running, events)
        await anyio.to_thread.run_sync(killed_in_a_stream, running)
        running.wait_restarted(before)
        last = Question(prompt_of("prose-16"), 8, request_id="the-last-one")
        ask(running.url, last).must_be(expected("prose-16", 8))
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"decode-0.{before['epoch']}.steplog", "decode-0.steplog", "prefill-0.steplog"]

    for name in names:
        code, says = replay(folder / name)
        assert code == 0, says
        assert f"{name}: identical: " in says
        assert says.endswith("; without its end\n" if name == names[0] else "; whole\n")
    both_logs_know("the-last-one", folder / "prefill-0.steplog", folder / "decode-0.steplog")
    every_stage_is_shown(folder / "decode-0.steplog", folder / names[0])
    killed, prefill = list(read(folder / names[0])), list(read(folder / "prefill-0.steplog"))
    assert kinds_in(killed) >= {Added, Aborted, TransferFailed, BlocksLanded, RequestNote, StepNote}
    assert kinds_in(prefill) >= {Added, LeaseGranted, RequestNote, StepNote}
    assert preemptions_in(folder / names[0]) > 0
    for records in (killed, prefill):
        submitted = {note.request_id: note.submitted for note in records if isinstance(note, RequestNote)}
        for added in records:
            if isinstance(added, Added):
                request = added.request
                assert request.arrival <= submitted[request.request_id] <= added.now
        for note in records:
            if isinstance(note, StepNote):
                assert note.dispatched < note.returned < note.published
                assert 0 < note.schedule_s < 1


def killed_in_a_stream(deployment: Deployment) -> None:
    heard = 0

    def hear() -> None:
        nonlocal heard
        heard += 1
        if heard == 5:
            deployment.signal("decode-0", signal.SIGKILL)

    answer = in_background(deployment.url, Question(prompt_of("prose-16"), 64, stream=True), hear).result()
    answer.must_be_an_error("engine_unavailable", expected("prose-16", 64))


def preemptions_in(log: Path) -> int:
    with read(log) as records:
        run = Replay(records.header)
        for record in records:
            run.take(record)
    return run.core.stats().preemptions_total
