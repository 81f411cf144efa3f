"""Steps launched ahead: where their input comes from, what is remembered, and that nobody waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.messages.plan import NewRequest, StepPlan, StepResult
from actors.messages.request import SamplingParams
from runner import model_runner
from runner.device import Device, HostCopy, Mark
from runner.model_runner import ModelRunner
from runner.requests import RequestTable
from runner.step_in_progress import StepInProgress
from runner.store.store import resolve
from tests.runner.harness import Harness, int32
from tests.runner.late import Poison, answer_late

TinyModel = Callable[..., tuple[Any, Path]]
PROMPT = np.random.default_rng(4).integers(0, 320, 20).tolist()


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model()[1]


@pytest.fixture
def runner(folder: Path, tmp_path: Path) -> ModelRunner:
    return make_runner(folder, tmp_path)


def make_runner(folder: Path, cache: Path, kv_dtype: str = "auto") -> ModelRunner:
    return ModelRunner(
        resolve(str(folder), cache),
        device="cpu",
        dtype="float32",
        kv_dtype=kv_dtype,
        num_blocks=80,
        block_size=16,
        threads=0,
    )


def new(request_id: str, prompt: Sequence[int] = PROMPT, **sampling: Any) -> NewRequest:
    return NewRequest(request_id, int32(prompt), len(prompt), SamplingParams(**sampling))


def plan(
    step: int,
    rows: Sequence[tuple[str, int, int, Sequence[int]]],
    new_requests: Sequence[NewRequest] = (),
    dropped: Sequence[str] = (),
    chunks: Sequence[str] = (),
) -> StepPlan:
    """rows: (request, tokens computed before, tokens to compute, new blocks); each samples, `chunks` do not."""
    return StepPlan(
        step=step,
        request_ids=tuple(request_id for request_id, _, _, _ in rows),
        num_scheduled_tokens=int32([count for _, _, count, _ in rows]),
        num_computed_tokens=int32([computed for _, computed, _, _ in rows]),
        num_sampled=int32([int(request_id not in chunks) for request_id, _, _, _ in rows]),
        num_new_blocks=int32([len(blocks) for _, _, _, blocks in rows]),
        new_block_ids=int32([block for _, _, _, blocks in rows for block in blocks]),
        new_requests=tuple(new_requests),
        dropped_request_ids=tuple(dropped),
    )


def ints(column: bytes) -> list[int]:
    return memoryview(column).cast("i").tolist()


def tokens_of(steps: Sequence[StepInProgress]) -> list[list[int]]:
    return [ints(step.result().sampled_token_ids) for step in steps]


def test_steps_launched_before_any_result_is_known(
    runner: ModelRunner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill and four decodes of two requests; the second comes in with the second step."""
    expected = Harness(make_runner(folder, tmp_path), 80, 16).run([PROMPT, PROMPT[:7]], 5)
    answer_late(monkeypatch)
    steps = [runner.launch(plan(0, [("a", 0, 20, [3, 9])], [new("a")]))]
    steps.append(runner.launch(plan(1, [("a", 20, 1, []), ("b", 0, 7, [4])], [new("b", PROMPT[:7])])))
    steps += [runner.launch(plan(k, [("a", 19 + k, 1, []), ("b", 5 + k, 1, [])])) for k in range(2, 5)]
    assert not any(step.done for step in steps)
    got = tokens_of(steps)
    assert [tokens[0] for tokens in got] == expected[0]
    assert [tokens[1] for tokens in got[1:]] == expected[1][:4]
    assert all(step.done for step in steps)


def test_the_input_comes_from_the_device_even_where_the_host_could_know_it(
    runner: ModelRunner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host hears 0 of every token but the last, and asks at once; the last is still the right one."""
    expected = Harness(make_runner(folder, tmp_path), 80, 16).run([PROMPT], 5)[0]
    assert expected[4] != 0
    poison = Poison(monkeypatch)
    heard = tokens_of([runner.launch(plan(0, [("a", 0, 20, [3, 9])], [new("a")]))])
    for step in range(1, 5):
        poison.on = step < 4
        heard += tokens_of([runner.launch(plan(step, [("a", 19 + step, 1, [])]))])
    assert heard == [[0], [0], [0], [0], [expected[4]]]


def test_a_slot_has_a_new_owner_while_its_old_ones_step_is_under_way(
    runner: ModelRunner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a` has ended with step 0; step 1 computes a row for it all the same, and step 2 gives its blocks to `b`."""
    expected = Harness(make_runner(folder, tmp_path), 80, 16).run([PROMPT[5:]], 3)[0]
    answer_late(monkeypatch)
    steps = [
        runner.launch(plan(0, [("a", 0, 20, [3, 9])], [new("a")])),
        runner.launch(plan(1, [("a", 20, 1, [])])),
        runner.launch(plan(2, [("b", 0, 15, [9, 3])], [new("b", PROMPT[5:])], dropped=["a"])),
        runner.launch(plan(3, [("b", 15, 1, [])])),
        runner.launch(plan(4, [("b", 16, 1, [])])),
    ]
    assert tokens_of(steps)[2:] == [[token] for token in expected]


def test_the_same_request_resumed_while_its_old_step_is_under_way(
    runner: ModelRunner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens in flight are forgotten with it: step 2 starts from what the plan says."""
    expected = Harness(make_runner(folder, tmp_path), 80, 16).run([PROMPT, [*PROMPT, 11]], 2)
    assert expected[0][0] != 11
    answer_late(monkeypatch)
    steps = [
        runner.launch(plan(0, [("a", 0, 20, [3, 9])], [new("a")])),
        runner.launch(plan(1, [("a", 20, 1, [])])),
        runner.launch(plan(2, [("a", 0, 21, [5, 6])], [new("a", [*PROMPT, 11])], dropped=["a"])),
        runner.launch(plan(3, [("a", 21, 1, [])])),
    ]
    assert tokens_of(steps) == [[token] for token in expected[0] + expected[1]]


def test_sampled_tokens_can_be_computed_again(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback several sampled tokens are input of one step; the host has their values by then, or says so."""
    answer_late(monkeypatch)
    steps = [runner.launch(plan(0, [("a", 0, 20, [3, 9])], [new("a")]))]
    steps += [runner.launch(plan(step, [("a", 19 + step, 1, [])])) for step in range(1, 4)]
    with pytest.raises(ValueError, match="computes tokens 16 to 22, among them one that is still on its way"):
        runner.launch(plan(4, [("a", 16, 7, [])]))
    first = tokens_of(steps)
    again = runner.launch(plan(5, [("a", 16, 6, [])]))
    assert tokens_of([again]) == [first[2]]
    # What stood behind is void: of the token that step 3 sampled nothing is known any more.
    with pytest.raises(ValueError, match="computes up to token 24, but 23 are known"):
        runner.launch(plan(6, [("a", 23, 1, [])]))
    assert tokens_of([runner.launch(plan(7, [("a", 22, 1, [])]))]) == [first[3]]


def test_a_rollback_with_steps_in_flight(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that steps 1 and 2 sample arrive when their places in the sequence are gone."""
    answer_late(monkeypatch)
    steps = [runner.launch(plan(0, [("a", 0, 20, [3, 9])], [new("a")]))]
    steps += [runner.launch(plan(step, [("a", 19 + step, 1, [])])) for step in range(1, 3)]
    steps.append(runner.launch(plan(3, [("a", 16, 4, [])])))
    first = tokens_of(steps)
    assert first[3] == first[0]
    assert tokens_of([runner.launch(plan(4 + k, [("a", 20 + k, 1, [])])) for k in range(2)]) == first[1:3]


@pytest.mark.parametrize("longest", [1, 4])
def test_slots_are_as_many_as_live_requests(longest: int) -> None:
    table, live = RequestTable(16), list[str]()
    for step in range(40):
        dropped = [live.pop(0)] if len(live) == longest else []
        live.append(f"r{step}")
        rows = table.apply(plan(step, [(live[-1], 0, 20, [1, 2])], [new(live[-1])], dropped))
        assert len(table) == len(live)
        assert rows[0].state.slot < longest
    # Told anew without having been dropped.
    table.apply(plan(40, [(live[0], 0, 20, [1, 2])], [new(live[0])]))
    table.apply(plan(41, [("last", 0, 20, [1, 2])], [new("last")], live))
    assert table.num_slots == longest


def test_more_requests_than_slots_at_first(runner: ModelRunner) -> None:
    """70 at once: the slots grow in the middle, with tokens in them. Each says what it says alone."""
    prompts = [[index, 3 * index] for index in range(70)]
    harness = Harness(runner, 80, 16)
    requests = [harness.add(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    for request in requests[:40]:
        harness.step([(request, 2)])
    harness.step([(request, 1) for request in requests[:40]] + [(request, 2) for request in requests[40:]])
    for _ in range(2):
        harness.step([(request, 1) for request in requests])
    for request in requests:
        harness.finish(request)
    assert [request.output[:3] for request in requests[::23]] == harness.run(prompts[::23], 3)


class TimedEvent:
    def __init__(self, milliseconds: float, log: list[str]) -> None:
        self.milliseconds, self._log = milliseconds, log

    def elapsed_time(self, later: TimedEvent) -> float:
        self._log.append("elapsed")
        return later.milliseconds - self.milliseconds

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._log.append("waited")


def test_events_are_read_after_the_wait_and_give_seconds() -> None:
    log: list[str] = []
    start, computed, sampled, arrived = (TimedEvent(ms, log) for ms in (2.0, 10.0, 10.5, 11.0))
    events: Any = (start, computed, sampled)
    copy = HostCopy(torch.tensor([5], dtype=torch.int32), arrived)  # type: ignore[arg-type]
    step = StepInProgress(plan(8, [("a", 0, 1, [1])]), (), copy, events)
    assert not step.done
    assert step.result() == StepResult(8, int32([1]), int32([5]), execute_s=0.008, sample_s=0.0005)
    assert log == ["waited", "elapsed", "elapsed"]


class DeviceWithoutValues(Device):
    """Tensors of torch's "meta" device have a shape and no values: whoever looks at one, or computes with a tensor of
    the host, gets an error, where a GPU would make the host wait. The model's weights and the KV pool lie on it too."""

    def __init__(self, name: str, dtype: str, threads: int) -> None:
        super().__init__(name, dtype, threads)
        self.torch = torch.device("meta")
        self.is_cpu, self.is_asynchronous = False, True

    def tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values).to("meta")

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        assert tensor.is_meta
        assert tensor.dtype == torch.int32
        return HostCopy(torch.zeros(tensor.shape, dtype=torch.int32), None)

    def mark(self, clock: Callable[[], float]) -> Mark:
        return clock()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.7, "seed": 2}], ids=str)
def test_launching_never_looks_at_a_value(
    sampling: dict[str, Any], kv_dtype: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, chunk behind a context, decodes, fresh blocks, tokens from slots, growing slots; each kind of draw."""
    monkeypatch.setattr(model_runner, "Device", DeviceWithoutValues)
    runner = make_runner(folder, tmp_path, kv_dtype)
    assert runner.kv_pool.tensor.is_meta
    with pytest.raises(NotImplementedError, match="meta"):
        runner.kv_pool.tensor[0, 0, 0, 0, 0, 0].tolist()
    crowd = [f"r{index}" for index in range(70)]
    both = [new("a", **sampling), new("b", **sampling)]
    runner.launch(plan(0, [("a", 0, 9, [1, 2]), ("b", 0, 20, [3, 4])], both, chunks=["a"]))
    runner.launch(plan(1, [("a", 9, 11, []), ("b", 20, 1, [])]))
    runner.launch(
        plan(
            2,
            [("a", 20, 1, []), *((name, 0, 1, [5 + index]) for index, name in enumerate(crowd))],
            [new(name, [7], **sampling) for name in crowd],
            dropped=["b"],
        )
    )
    step = runner.launch(plan(3, [("a", 21, 1, [])]))
    assert ints(step.result().sampled_token_ids) == [0]
