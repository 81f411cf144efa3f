"""The floors of a step's stages, against sums by hand, and the stopwatch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.messages.model import ModelDescription
from tools.bench import stages
from tools.bench.stages import Held, Machine, Shape, Stopwatch, floors, held_dense
from tools.bench.step_profile import Profile, markdown

# 2 layers, hidden 4, intermediate 6, 2 heads of 2 and 1 KV head, 10 tokens of vocabulary.
MODEL = ModelDescription("", "", "llama", "", 10, 64, 4, 6, 2, 2, 1, 2, 1e-5, 1e5)
HELD = held_dense(MODEL, torch.bfloat16, token_bytes=2 * 2 * 2 * 2, weight_bytes=2)
BYTES = Machine(bytes_from_memory=1.0, bytes_from_cache=2.0, operations=1e30, call_s=0.0)
OPERATIONS = Machine(bytes_from_memory=1e30, bytes_from_cache=1e30, operations=1.0, call_s=0.0)


def test_bytes_of_a_decode_step() -> None:
    """3 rows behind 9 tokens in bfloat16.

    Per layer: qkv 4·(4+2+2), output 4·4, gate and up 2·4·6, down 6·4 = 120 weights; 10 tokens of 2·2 values each.
    """
    found = floors(Shape(3, 9, 1), MODEL, HELD, BYTES)
    assert found["weight products"] == 2 * 120 * 2
    assert found["attention"] == 2 * 3 * 10 * 4 * 2
    assert found["output head"] == 10 * 4 * 2
    assert found["SwiGLU"] == 2 * 3 * 18 * 2 / 2, "at the caches' rate"
    assert found["norms"] == 5 * 3 * 16 * 2 / 2, "two a layer and the last"
    assert found["sampling"] == 3 * 10 * 4 / 2


def test_what_is_held_smaller_is_read_sooner() -> None:
    """Weights of 40 and 10 bytes, 5 bytes of KV a token: the activations stay as they are."""
    dense = floors(Shape(3, 9, 1), MODEL, HELD, BYTES)
    small = floors(Shape(3, 9, 1), MODEL, Held(layers=40, head=10, token=5.0, value=2), BYTES)
    assert small == {**dense, "weight products": 40, "output head": 10, "attention": 3 * 10 * 5}


def test_operations_of_a_prefill() -> None:
    """4 tokens behind 2: they see 3 + 4 + 5 + 6 = 18 tokens, 4 values of a query each, 4 operations per value.

    Behind the last layer's attention one token goes on: 2 · (32 · 8 + 88 · 5) operations of weight products.
    """
    found = floors(Shape(1, 2, 4), MODEL, HELD, OPERATIONS)
    assert found["attention"] == 4 * 2 * 18 * 4
    assert found["weight products"] == 2 * (32 * 8 + 88 * 5)
    assert found["output head"] == 2 * 40


def test_what_does_not_fit_the_caches_comes_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_CACHE_BYTES", 100)
    assert BYTES.activations(3, 100) == 3 * 100 / 2
    assert BYTES.activations(3, 102) == 3 * 102


def test_every_call_costs_something() -> None:
    calls = Machine(1e30, 1e30, 1e30, call_s=1.0)
    found = floors(Shape(1, 0, 1), MODEL, HELD, calls)
    assert {stage: round(seconds) for stage, seconds in found.items()} == {
        "weight products": 8,
        "attention": 2,
        "rotation, KV write": 2,
        "norms": 5,
        "SwiGLU": 2,
        "output head": 1,
        "sampling": 1,
    }


def test_an_inner_stage_s_time_is_not_its_outer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second whenever it is looked at: the inner stage takes 1, both together 3."""
    ticks = iter(range(10))
    monkeypatch.setattr(stages.time, "perf_counter", lambda: float(next(ticks)))
    watch = Stopwatch()
    inner = watch.timed("inner", lambda: None)
    watch.timed("outer", inner)()
    assert watch.seconds == {"inner": 1.0, "outer": 2.0}


def test_the_profile_s_text() -> None:
    found = Profile(
        shape="decode",
        steps=[0.030, 0.030, 0.080],
        products=[0.010, 0.015, 0.020],
        reads=[0.010, 0.005, 0.020],
        stages=[{"norms": 0.004, "plan to tensors": 0.001}],
        floors={"norms": 0.002},
    )
    assert found.ratios == pytest.approx([1.5, 1.5, 2.0])
    lines = markdown(found, "a machine").splitlines()
    assert lines[0] == "**decode**: 30.00 ms (best 30.00)"
    assert lines[4:6] == ["| norms | 4.00 | 2.00 | 2.0 |", "| plan to tensors | 1.00 | | |"]
    assert "the step is **1.50** times both" in lines[7]


def test_bench_is_no_part_of_what_runs() -> None:
    """Nothing outside tools/bench and its tests imports it, but the connectors' test of a real transfer."""
    root = Path(__file__).parents[3]
    importers = [
        path.relative_to(root).as_posix()
        for top in ("actors", "api", "connectors", "runner", "tools")
        for path in (root / top).rglob("*.py")
        if "tools.bench" in path.read_text() and "bench" not in path.parts
    ]
    assert importers == []
