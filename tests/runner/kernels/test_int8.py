"""Keys and values as int8: every set of instructions against plain torch, which is checked by hand.

What is stored is compared to the bit: a product, a quotient and two roundings are the same everywhere.
"""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
import torch

from runner.kernels import reference
from runner.kernels.cpu.backend import CpuKernels
from runner.kv_quantisation import dequantise, quantise
from tests.runner.kernels.conftest import Case, Inputs, in_int8, inputs
from tests.runner.kernels.test_operators import ATTENTION, ATTENTION_BOUNDS, DTYPES

OPERATORS = torch.ops.kvyard


def test_by_hand() -> None:
    """The largest is 127 steps. 63.5 and 0.5 lie between two steps: the even one."""
    states = torch.tensor([[127.0, -63.5, 0.5, 1.5], [-2.54, 1.27, 0.0, 0.0094], [0.0, -0.0, 0.0, 0.0]])
    quantised, scales = quantise(states)
    # 2.54 / 127 = 0.02 is no bfloat16; the nearest is 164 / 8192. 1.27 / 0.02002 = 63.4, 0.0094 / 0.02002 = 0.47.
    assert scales.tolist() == [1.0, 164 / 8192, 0.0]
    assert quantised.tolist() == [[127, -64, 0, 2], [-127, 63, 0, 0], [0, 0, 0, 0]]
    assert dequantise(quantised, scales, torch.float32)[1].tolist() == [-127 * 164 / 8192, 63 * 164 / 8192, 0.0, 0.0]


def test_an_element_is_off_by_half_a_step() -> None:
    """A step is max / 127 but for the rounding of the scale, 2^-8: 127.496 steps at the most, which still is 127."""
    states = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 1000)[:, None]
    error = (dequantise(*quantise(states), torch.float32) - states).abs()
    assert bool((error.amax(-1) <= states.abs().amax(-1) / 127 * (0.5 * (1 + 2**-8) + 1e-5)).all())


def test_what_is_stored(tier: str) -> None:
    """One token of each kind: nothing, nearly nothing, the largest there are, and what must not be hidden."""
    rows = torch.zeros(7, 64)
    rows[1], rows[2, 5], rows[3, 63], rows[4, 0] = 1e-39, 3e38, torch.nan, torch.inf
    rows[5, 1], rows[6] = -torch.inf, torch.arange(64) / 2 - 8
    given = in_int8(inputs(Case([(0, 7)], group_size=1), torch.float32))
    given.qkv[:, 128:] = rows
    OPERATORS.rotate_and_store(*given.storing(1))
    assert given.scales is not None
    values, scales = (tensor.flatten(0, 1)[:, 1, 1] for tensor in (given.pool, given.scales))
    (span,) = {row // (4 * 16) for row in given.stored.tolist()}  # two layers of keys and values
    assert scales[span, :3].tolist() == [0.0, 0.0, torch.tensor(3e38 / 127).bfloat16().item()]
    assert scales[span, 3:6].float().isfinite().tolist() == [False] * 3
    assert not values[span, :2].any()
    assert values[span, 2].tolist() == [0] * 5 + [127] + [0] * 58
    # 23.5 / 127 = 189.48 / 1024, of which bfloat16 has the whole numbers. No element lies between two steps.
    assert values[span, 6].tolist() == [round((index / 2 - 8) * 1024 / 189) for index in range(64)]


STORED = [
    Case([(0, 1)]),
    Case([(9, 1), (0, 5), (30, 20)], kv_heads=3),
    Case([(3, 9)], head_size=80, group_size=4, kv_heads=2),
    Case([(3, 9)], head_size=22, block_size=4),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", STORED, ids=str)
def test_storing(case: Case, dtype: torch.dtype, tier: str) -> None:
    """The pool has, to the bit, what plain torch makes of the turned keys and the values; nothing else is touched."""
    given = in_int8(inputs(case, dtype))
    before = msgspec.structs.replace(given, pool=given.pool.clone(), scales=stored_scales(given).clone())
    OPERATORS.rotate_and_store(*given.storing(1))
    states = given.qkv.view(len(given.qkv), -1, case.head_size)[:, -2 * case.kv_heads :]
    for kind, own in enumerate(states.chunk(2, 1)):
        reference.store(kind, own, before.pool, before.stored, 1, before.scales)
    assert torch.equal(given.pool, before.pool)
    torch.testing.assert_close(given.scales, before.scales, rtol=0, atol=0, equal_nan=True)
    # Turned as without int8.
    plain = inputs(case, dtype)
    OPERATORS.rotate_and_store(*plain.storing(1))
    assert torch.equal(given.qkv, plain.qkv)


def stored_scales(given: Inputs) -> torch.Tensor:
    assert given.scales is not None
    return given.scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention(case: Case, dtype: torch.dtype, tier: str) -> None:
    """Against the dequantised pool in float32. What a row may not read has the scale NaN: a touch would show."""
    given = in_int8(inputs(case, dtype))
    expected = reference.paged_attention(*given.attention(1))  # type: ignore[arg-type]
    assert expected.isfinite().all()
    bounds = ATTENTION_BOUNDS[dtype]
    attended = OPERATORS.paged_attention(*given.attention(1))
    torch.testing.assert_close(attended, expected, rtol=bounds["rtol"], atol=bounds["atol"])


def test_the_reference_reads_what_quantising_means() -> None:
    """Attention over int8 is attention over the pool with every vector replaced by scale · q."""
    given = inputs(Case([(5, 1), (0, 40), (37, 3)], kv_heads=2), torch.float32)
    expected = reference.paged_attention(*in_int8(given).attention(1))  # type: ignore[arg-type]
    rounded = msgspec.structs.replace(given, pool=dequantise(*quantise(given.pool), torch.float32))
    assert torch.equal(reference.paged_attention(*rounded.attention(1)), expected)  # type: ignore[arg-type]
    exact = reference.paged_attention(*given.attention(1))  # type: ignore[arg-type]
    assert 1e-4 < float((exact - expected).abs().max()) < 0.03


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype, tier: str) -> None:
    """To the bit: alone or among others, on one thread or two, whole or in chunks."""
    given = in_int8(inputs(Case([(5, 1), (700, 1), (1300, 1), (0, 60), (37, 23), (600, 30)], kv_heads=2), dtype))
    together = OPERATORS.paged_attention(*given.attention(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(OPERATORS.paged_attention(*given.attention(1)), together)
    torch.set_num_threads(threads)
    starts = given.starts.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        for first in range(start, end, 7):
            last = min(end, first + 7)
            part = msgspec.structs.replace(
                given,
                qkv=given.qkv[first:last],
                block_tables=given.block_tables[row : row + 1],
                starts=torch.tensor([0, last - first], dtype=torch.int32),
                contexts=given.contexts[row : row + 1] + (first - start),
            )
            assert torch.equal(OPERATORS.paged_attention(*part.attention(1)), together[first:last]), (row, first)


def test_a_token_of_zeros_is_no_nan(tier: str) -> None:
    """Its key has score 0 with every query, its value adds nothing: one of three equal weights goes to it."""
    given = in_int8(inputs(Case([(0, 3)], group_size=1), torch.float32))
    given.qkv[:] = 0
    given.qkv[1:, 128:] = 6.0
    OPERATORS.rotate_and_store(*given.storing(1))
    attended = OPERATORS.paged_attention(*given.attention(1))
    assert not attended[0].any()
    step = torch.tensor(6 / 127).bfloat16().item()
    torch.testing.assert_close(attended[2], torch.full((64,), math.fsum([127 * step] * 2) / 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_accepts_the_operators(dtype: torch.dtype, native: CpuKernels) -> None:
    given = in_int8(inputs(Case([(5, 1), (0, 6)]), dtype))
    # opcheck compares what is written to with equal, and wants no two arguments in one storage.
    given.pool, given.scales = given.pool.clone(), stored_scales(given).nan_to_num(0.0)
    torch.library.opcheck(OPERATORS.paged_attention.default, given.attention(1))
    torch.library.opcheck(OPERATORS.rotate_and_store.default, given.storing(1))


def test_what_does_not_fit_is_refused(native: CpuKernels) -> None:
    plain = inputs(Case([(5, 1), (0, 6)]), torch.float32)
    given = in_int8(plain)
    scales = stored_scales(given)
    for pool, wrong, said in (
        (given.pool, None, "another dtype"),
        (plain.pool, scales, "another dtype"),
        (given.pool, scales.float(), "scales do not fit"),
        (given.pool, scales[..., :8], "scales do not fit"),
        (given.pool.transpose(2, 3), scales, "the pool must be"),
        (given.pool[:, :, :1], scales, "heads dense|scales do not fit"),
    ):
        with pytest.raises(RuntimeError, match=said):
            OPERATORS.paged_attention(*msgspec.structs.replace(given, pool=pool, scales=wrong).attention(0))
