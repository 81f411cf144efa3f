"""Sampling: which tokens can come, how often, and what a draw depends on. Logits are made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from actors.messages.request import SamplingParams
from runner.device import Device
from runner.kernels import registry
from runner.kernels.torch_kernels import TorchKernels
from runner.sampling import Draw

DEVICE = Device("cpu", "float32", 0)
# log of the probabilities 0.4, 0.3, 0.2, 0.1 at the ids 2, 0, 3, 1.
PROBABILITIES = torch.tensor([0.3, 0.1, 0.4, 0.2])


def draws(count: int, seed: int | str = 11, **settings: Any) -> list[Draw]:
    sampling = SamplingParams(**({"temperature": 1.0} | settings))
    return [Draw(sampling, seed, position) for position in range(count)]


Sample = Callable[[torch.Tensor, Sequence[Draw]], torch.Tensor]


@pytest.fixture(params=["auto", "torch"])
def sample(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """By the machine's own kernels, and by plain torch."""
    monkeypatch.setenv("KVYARD_KERNELS", request.param)
    return registry.choose(DEVICE).sample


def frequencies(sample: Sample, count: int, **settings: Any) -> list[float]:
    logits = PROBABILITIES.log().repeat(count, 1)
    chosen = sample(logits, draws(count, **settings))
    return (torch.bincount(chosen, minlength=4) / count).tolist()


def test_greedy_takes_the_first_of_equals(sample: Sample) -> None:
    logits = torch.zeros(3, 49152)
    logits[0, [40_000, 17, 49_151]] = 2.5
    logits[1, [49_150, 49_151]] = 1.0
    assert sample(logits, draws(3, temperature=0.0)).tolist() == [17, 49_150, 0]


def test_frequencies_follow_the_probabilities(sample: Sample) -> None:
    """20,000 draws: the standard deviation of a frequency is below 0.0035; 0.015 is more than four of them."""
    assert frequencies(sample, 20_000) == pytest.approx(PROBABILITIES.tolist(), abs=0.015)


def test_temperature_sharpens(sample: Sample) -> None:
    """At temperature 0.5 probabilities are squared and normalised: 16, 9, 4, 1 of 30."""
    assert frequencies(sample, 20_000, temperature=0.5) == pytest.approx([9 / 30, 1 / 30, 16 / 30, 4 / 30], abs=0.015)


def test_top_k_keeps_the_k_likeliest(sample: Sample) -> None:
    """0.4 and 0.3 remain, normalised."""
    assert frequencies(sample, 20_000, top_k=2) == pytest.approx([3 / 7, 0, 4 / 7, 0], abs=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_p(sample: Sample) -> None:
    """0.4 + 0.3 < 0.75 <= 0.4 + 0.3 + 0.2: three tokens remain."""
    assert frequencies(sample, 20_000, top_p=0.75) == pytest.approx([3 / 9, 0, 4 / 9, 2 / 9], abs=0.015)
    assert frequencies(sample, 50, top_p=1e-6) == [0, 0, 1, 0]


def test_top_p_counts_within_top_k(sample: Sample) -> None:
    """Of 4/7 and 3/7, the first alone reaches 0.5."""
    assert frequencies(sample, 50, top_k=2, top_p=0.5) == [0, 0, 1, 0]


def test_top_p_on_a_flat_distribution_looks_at_the_whole_vocabulary(sample: Sample) -> None:
    """All of 8,192 tokens are equally likely: 0.5 takes half of them, more than the first look of 1,024."""
    logits = torch.zeros(1, 8192).repeat(1000, 1)
    logits[:, 5000] = 1e-4
    chosen = sample(logits, draws(1000, top_p=0.5))
    # Stable order: token 5000 first, then the lowest ids. 1,000 draws of 4,096 tokens give about 887 different ones.
    assert all(token == 5000 or token < 4096 for token in chosen.tolist())
    assert 840 < len(set(chosen.tolist())) < 930


def test_a_draw_depends_on_seed_and_position_only(sample: Sample) -> None:
    """Logits in steps of 0.5, so that top-k cuts through many equal ones."""
    logits = (torch.randn(12, 3000, generator=torch.Generator().manual_seed(0)) * 2).round() / 2
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 30},
        {"top_p": 0.8},
        {"top_k": 900, "top_p": 0.9},
        {"temperature": 2.0},
    ]
    rows = [draws(row + 1, seed=row % 3, **kinds[row % 6])[-1] for row in range(12)]
    together = sample(logits, rows).tolist()
    alone = [int(sample(logits[row : row + 1], [rows[row]])) for row in range(12)]
    backwards = sample(logits.flip(0), rows[::-1]).tolist()[::-1]
    assert together == alone == backwards


def test_seeds_and_positions_make_different_draws(sample: Sample) -> None:
    """1,000 draws of 1,000 equally likely tokens agree in about one place when independent."""
    logits = torch.zeros(1000, 1000)
    first, second = (sample(logits, draws(1000, seed=seed)) for seed in (1, 2))
    assert int((first == second).sum()) < 10
    assert torch.equal(first, sample(logits, draws(1000, seed=1)))
    # 1,000 draws of 1,000 hit about 632 different ones; a stuck generator few, a permutation all.
    assert 580 < len(set(first.tolist())) < 690


def test_hostile_values_stay_finite(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 80.0, -1e30, 3.0]])
    hostile: list[dict[str, Any]] = [{"temperature": 1e-30}, {"temperature": 1e-5}]
    hostile += [{"temperature": 1e-5, "top_p": 1e-9, "top_k": 4000}]
    for settings in hostile:
        for seed in (2**63, -1, 0):
            assert sample(logits, draws(1, seed=seed, **settings)).tolist() == [1]


def test_both_ways_of_drawing_agree() -> None:
    """1,500 draws with 3,001 tokens: logarithms may differ in their last bit, which decides next to nothing."""
    logits = torch.randn(1500, 3001, generator=torch.Generator().manual_seed(4)) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_k": 500, "top_p": 0.5},
        {"temperature": 0.0},
    ]
    rows = [draws(row + 1, seed=row, **({"temperature": 0.7} | kinds[row % 5]))[-1] for row in range(1500)]
    native, plain = registry.choose(DEVICE), TorchKernels(DEVICE)
    assert native.name != plain.name
    assert int((native.sample(logits, rows) != plain.sample(logits, rows)).sum()) <= 2
