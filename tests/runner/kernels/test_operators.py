"""Each native operator against plain torch, on every set of instructions that this CPU has.

float32 differs by the order of sums only: a few units in the last place. bfloat16 has 8 bits: one rounding is 2^-9 of a
value; the bounds below are two such roundings for row-wise operators, and for attention those of the weights too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runner.kernels import packed_dense, reference
from runner.kernels.cpu.backend import CpuKernels
from runner.kernels.packed_dense import PackedDense
from tests.runner.kernels.conftest import Case, inputs

OPERATORS = torch.ops.kvyard
Pack = Callable[[torch.Tensor], torch.Tensor]
Multiply = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16)
ROW_BOUNDS = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-8}}
ATTENTION_BOUNDS = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-6}}

ATTENTION = {
    "one-token": Case([(0, 1)]),
    "around-a-vector": Case([(14, 1), (15, 1), (16, 1), (30, 1), (31, 1), (32, 1), (33, 1)]),
    "around-a-chunk": Case([(126, 1), (127, 1), (128, 1), (200, 1), (255, 1), (256, 1)], group_size=1),
    "around-a-part": Case([(510, 1), (511, 1), (512, 1), (1024, 1), (1500, 1)], kv_heads=2, group_size=4),
    "prefill": Case([(0, 75)], kv_heads=3),
    "prefill-over-parts": Case([(0, 530)], group_size=4),
    "mixed": Case([(5, 1), (700, 1), (0, 2), (0, 40), (37, 23), (600, 30)], kv_heads=3),
    "head-80": Case([(20, 1), (3, 30)], group_size=1, head_size=80),
    "head-128": Case([(40, 1), (10, 9)], group_size=4, head_size=128),
    "head-256": Case([(17, 1), (0, 20)], group_size=2, head_size=256),
    "odd-head": Case([(19, 1), (2, 7)], head_size=22),
    "small-blocks": Case([(9, 1), (130, 1), (6, 50)], kv_heads=2, block_size=4, head_size=16),
    "blocks-of-no-vector": Case([(100, 1), (7, 50)], block_size=7),
    "many-heads-share-one": Case([(50, 1), (9, 4)], group_size=71, head_size=32),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention(case: Case, dtype: torch.dtype, tier: str) -> None:
    """NaN everywhere outside of what a row may read: a single touch would show."""
    given = inputs(case, dtype)
    expected = reference.paged_attention(*given.attention(1))  # type: ignore[arg-type]
    assert expected.isfinite().all()
    torch.testing.assert_close(OPERATORS.paged_attention(*given.attention(1)), expected, **ATTENTION_BOUNDS[dtype])


def test_large_scores_do_not_overflow(tier: str) -> None:
    """exp of 20,000 would; the weights then are 1 for the largest and 0 for all others."""
    given = inputs(Case([(200, 1), (0, 9)]), torch.float32)
    given.qkv *= 1e4
    expected = reference.paged_attention(*given.attention(1))  # type: ignore[arg-type]
    torch.testing.assert_close(OPERATORS.paged_attention(*given.attention(1)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_attention_does_not_depend_on_its_company(dtype: torch.dtype, tier: str) -> None:
    """To the bit: alone or among others, on one thread or two, whole or in chunks."""
    rows = [(5, 1), (700, 1), (1300, 1), (0, 60), (37, 23), (600, 30)]
    given = inputs(Case(rows, kv_heads=2), dtype)
    together = OPERATORS.paged_attention(*given.attention(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(OPERATORS.paged_attention(*given.attention(1)), together)
    torch.set_num_threads(threads)
    scale = 64**-0.5
    for row, (start, end) in enumerate(zip(given.starts.tolist(), given.starts.tolist()[1:], strict=False)):
        for first in range(start, end, 7):
            last = min(end, first + 7)
            part = OPERATORS.paged_attention(
                given.qkv[first:last],
                given.pool,
                given.block_tables[row : row + 1],
                torch.tensor([0, last - first], dtype=torch.int32),
                given.contexts[row : row + 1] + (first - start),
                1,
                scale,
            )
            assert torch.equal(part, together[first:last]), (row, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case([(0, 1)]),
        Case([(9, 1), (0, 5), (30, 20)], kv_heads=3),
        Case([(3, 9)], head_size=80, group_size=4, kv_heads=2),
        Case([(3, 9)], head_size=22, block_size=4),
        Case([(0, 300)], kv_heads=3),
    ],
    ids=str,
)
def test_rotation_and_storing(case: Case, dtype: torch.dtype, tier: str) -> None:
    got, expected = inputs(case, dtype), inputs(case, dtype)
    for given, rotate_and_store in ((got, OPERATORS.rotate_and_store), (expected, reference.rotate_and_store)):
        rotate_and_store(given.qkv, given.angles, given.positions, given.pool, given.stored, 1)
    # Plain torch rounds the first product, of up to 4, before it adds the second: 2^-7.
    torch.testing.assert_close(got.qkv, expected.qkv, **ATTENTION_BOUNDS[dtype])
    torch.testing.assert_close(got.pool, expected.pool, equal_nan=True, **ATTENTION_BOUNDS[dtype])
    # Values are copied, not computed with.
    untouched = inputs(case, dtype).qkv.view(len(got.qkv), -1, case.head_size)[:, -case.kv_heads :]
    assert torch.equal(got.qkv.view(len(got.qkv), -1, case.head_size)[:, -case.kv_heads :], untouched)
    assert torch.equal(got.pool.view(-1, case.head_size)[3 * case.block_size + got.stored], untouched.flatten(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 17), (200, 576), (2, 1), (5, 4096)], ids=str)
@pytest.mark.parametrize("with_delta", [False, True])
def test_norm(with_delta: bool, shape: tuple[int, int], dtype: torch.dtype, tier: str) -> None:
    generator = torch.Generator().manual_seed(1)
    residual = (torch.randn(shape, generator=generator) * 3).to(dtype)
    delta = torch.randn(shape, generator=generator).to(dtype) if with_delta else None
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    own, other = residual.clone(), residual.clone()
    expected = reference.add_rms_norm(other, delta, weight, 1e-5)
    torch.testing.assert_close(OPERATORS.add_rms_norm(own, delta, weight, 1e-5), expected, **ROW_BOUNDS[dtype])
    assert torch.equal(own, other)


PRODUCTS = ("avx512bf16",)  # the sets of instructions with products of bfloat16


def test_tiers_without_products_say_so(tier: str) -> None:
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    if tier in PRODUCTS:
        assert OPERATORS.packed_linear(weight, OPERATORS.pack_weight(weight), 4).tolist() == [[8.0] * 4] * 4
    else:
        with pytest.raises(RuntimeError, match="this CPU has no products of bfloat16"):
            OPERATORS.pack_weight(weight)


@pytest.fixture
def pack_weight(native: CpuKernels) -> Pack:
    """The native one, where there is one; both give the same bytes."""
    return OPERATORS.pack_weight if native.tier in PRODUCTS else reference.pack_weight


@pytest.fixture
def packed_linear(native: CpuKernels) -> Multiply:
    return OPERATORS.packed_linear if native.tier in PRODUCTS else reference.packed_linear


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 10, 12, 13, 16, 24, 271, 600])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 576), (100, 64), (7, 8), (33, 1536)], ids=str)
def test_product(
    rows: int, outputs: int, inputs: int, native: CpuKernels, pack_weight: Pack, packed_linear: Multiply
) -> None:
    """Sums in float32, one rounding at the end: half a unit of bfloat16, 2^-9, of the exact result."""
    generator = torch.Generator().manual_seed(rows)
    weight = with_outliers(outputs, inputs, generator)
    row = torch.randn(rows, inputs, generator=generator).bfloat16()
    packed = pack_weight(weight)
    assert torch.equal(packed, reference.pack_weight(weight))
    exact = row.double() @ weight.double().T
    got = packed_linear(row, packed, outputs)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4 * inputs**0.5)
    torch.testing.assert_close(reference.packed_linear(row, packed, outputs).double(), exact, rtol=2**-7, atol=2**-6)
    if native.tier in PRODUCTS:
        wide = OPERATORS.packed_linear(row, packed, outputs, to_float32=True)
        assert torch.equal(wide.bfloat16(), got), "rounded once, where it is rounded"
        torch.testing.assert_close(wide, reference.packed_linear(row, packed, outputs, True), rtol=1e-4, atol=1e-3)


def with_outliers(outputs: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed, with an exponent in ten, and one weight of every row, that 15 others leave no room for."""
    weight = torch.randn(outputs, inputs, generator=generator)
    weight[torch.rand(outputs, inputs, generator=generator) < 0.1] *= 2**-20
    weight[torch.arange(outputs), torch.randint(inputs, (outputs,), generator=generator)] = 20.0
    return weight.bfloat16()


def test_a_row_of_a_product_does_not_depend_on_its_company(native: CpuKernels) -> None:
    """To the bit, in every number of rows that is cut differently. oneDNN does not promise that."""
    if native.tier not in PRODUCTS:
        return
    generator = torch.Generator().manual_seed(3)
    packed = OPERATORS.pack_weight(with_outliers(600, 576, generator))
    rows = torch.randn(1600, 576, generator=generator).bfloat16()
    together = OPERATORS.packed_linear(rows, packed, 600)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 20, 28, 100, 275, 800):
        assert torch.equal(OPERATORS.packed_linear(rows[7 : 7 + count], packed, 600), together[7 : 7 + count]), count


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (16, 8), (17, 64), (600, 576)], ids=str)
def test_packing_loses_nothing(outputs: int, inputs: int, native: CpuKernels, pack_weight: Pack) -> None:
    """Every bfloat16 there is, infinite, NaN, subnormal and negative zero among them, comes back to the bit."""
    generator = torch.Generator().manual_seed(outputs)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    weight = every[torch.randint(1 << 16, (outputs, inputs), generator=generator)].view(torch.bfloat16)
    if weight.numel() > 1 << 17:
        weight.view(-1)[: 1 << 16] = every.view(torch.bfloat16)
    packed = pack_weight(weight)
    assert torch.equal(packed, reference.pack_weight(weight))
    assert torch.equal(bits_of(packed_dense.unpacked(packed, outputs, inputs)), bits_of(weight))
    ids = torch.randint(outputs, (40,), generator=generator)
    look_up = OPERATORS.packed_embedding if native.tier in PRODUCTS else reference.packed_embedding
    assert torch.equal(bits_of(look_up(ids, packed, outputs, weight[0])), bits_of(weight[ids]))


def test_what_is_packed(native: CpuKernels) -> None:
    """In three quarters of its bytes where a matrix' exponents allow it; noise, odd widths and float32 stay dense."""
    usual = torch.randn(64, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = native.pack(usual)
    if native.tier in PRODUCTS:
        assert isinstance(packed, PackedDense)
        assert 0.75 <= packed.packed.nbytes / usual.nbytes < 0.76
    noise = (usual * torch.exp(30 * torch.rand(64, 576) - 15)).bfloat16()
    for stays_dense in (usual.float(), usual[:, :12], noise):
        assert native.pack(stays_dense) is stays_dense


@pytest.mark.parametrize("wrong", [-1, 5])
def test_no_row_beyond_a_packed_matrix_is_looked_up(wrong: int, native: CpuKernels) -> None:
    if native.tier in PRODUCTS:
        weight = torch.ones(5, 8, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match=f"there is no token {wrong}"):
            OPERATORS.packed_embedding(torch.tensor([wrong]), OPERATORS.pack_weight(weight), 5, weight[0])


def test_sizes_that_no_packed_matrix_has(native: CpuKernels) -> None:
    """Of none and of more than there can be: 2^60 outputs of 16 inputs are 0 bytes, counted in 64 bits."""
    if native.tier not in PRODUCTS:
        return
    rows = torch.ones(1, 16, dtype=torch.bfloat16)
    packed = OPERATORS.pack_weight(rows)
    for outputs in (-1, 0, 17, 1 << 60, (1 << 60) - 16, 1 << 62):
        with pytest.raises(RuntimeError, match="the packed weight does not fit"):
            OPERATORS.packed_linear(rows, packed, outputs)
        with pytest.raises(RuntimeError, match="the packed weight does not fit"):
            OPERATORS.packed_embedding(torch.tensor([outputs - 1]), packed, outputs, rows[0])
    with pytest.raises(RuntimeError, match="the packed weight does not fit"):
        OPERATORS.packed_linear(rows[:, :0], packed, 1)
    for empty, reason in ((rows[:, :0], "not a multiple of 8"), (rows[:0], "no outputs")):
        with pytest.raises(RuntimeError, match=reason):
            OPERATORS.pack_weight(empty)


def test_norm_of_zeros_is_zero(tier: str) -> None:
    assert not OPERATORS.add_rms_norm(torch.zeros(2, 20), None, torch.ones(20), 1e-5).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3072), (3, 34), (100, 3072)], ids=str)
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype, tier: str) -> None:
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0]).to(dtype)
    expected = reference.swiglu(gate_up)
    torch.testing.assert_close(OPERATORS.swiglu(gate_up), expected, **ROW_BOUNDS[dtype])


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 1003, 49_152])
def test_draw(vocabulary: int, tier: str) -> None:
    """Against sorting everything. Logits in steps of 0.5 are full of equals, which top-k and top-p cut through."""
    rows = 36
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 2).mul(2).round().div(2)
    logits[::3] += torch.randn(len(logits[::3]), vocabulary, generator=generator)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(9)
    top_k = torch.tensor([vocabulary, 1, 7, 900]).clamp(max=vocabulary).repeat_interleave(9)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.999, 1e-6, 0.01]).repeat(6)
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(torch.int32)
    arguments = logits, temperatures, top_k, top_p, keys
    different = OPERATORS.draw(*arguments) != reference.draw(*arguments)
    assert int(different.sum()) <= 1, different.nonzero()


def test_draws_from_hostile_logits(tier: str) -> None:
    """Masked tokens are never drawn; of a row without any other the first is."""
    logits = torch.full((3, 100), -torch.inf)
    logits[0, 70], logits[1, 99], logits[1, 3] = -5.0, 1e30, 1e30
    columns = torch.full((3,), 1.0), torch.full((3,), 100), torch.full((3,), 0.9), torch.zeros(3, 2, dtype=torch.int32)
    assert OPERATORS.draw(logits, *columns)[0] == 70
    assert OPERATORS.draw(logits, *columns)[1] in (3, 99)
    greedy = torch.zeros(3), *columns[1:]
    assert OPERATORS.draw(logits, *greedy).tolist() == [70, 3, 0]


def test_a_nan_stays_visible(tier: str) -> None:
    """A kernel that swallowed it would hide a broken model."""
    gate_up = torch.ones(1, 8)
    gate_up[0, 1] = torch.nan
    assert OPERATORS.swiglu(gate_up).isnan().tolist() == [[False, True, False, False]]
    for dtype in DTYPES:
        row = torch.ones(1, 20, dtype=dtype)
        row[0, 3] = torch.nan
        assert OPERATORS.add_rms_norm(row, None, torch.ones(20, dtype=dtype), 1e-5).isnan().all()


@pytest.mark.parametrize("position", [0, 100, 511, 512, 513, 1024])
def test_a_nan_key_stays_visible(position: int, tier: str) -> None:
    """Also where it is all that a query sees of a part of 512 tokens."""
    given = inputs(Case([(position, 1)]), torch.float32)
    given.pool[given.block_tables[0, position // 16], 0, 1, 0, position % 16, 3] = torch.nan
    assert OPERATORS.paged_attention(*given.attention(1)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_accepts_the_operators(dtype: torch.dtype, native: CpuKernels) -> None:
    """Schemas that tell the truth about what is written to, and fakes with the shapes of the real results."""
    given = inputs(Case([(5, 1), (0, 6)]), dtype)
    given.pool.nan_to_num_(0.0)
    check = torch.library.opcheck
    check(OPERATORS.paged_attention.default, given.attention(1))
    check(
        OPERATORS.rotate_and_store.default,
        (given.qkv, given.angles, given.positions, given.pool, given.stored, 1),
    )
    row, weight = torch.randn(3, 32).to(dtype), torch.ones(32, dtype=dtype)
    check(OPERATORS.add_rms_norm.default, (row, row.clone(), weight, 1e-5))
    check(OPERATORS.add_rms_norm.default, (row, None, weight, 1e-5))
    check(OPERATORS.swiglu.default, (row,))
    columns = torch.ones(3), torch.full((3,), 5), torch.ones(3), torch.zeros(3, 2, dtype=torch.int32)
    check(OPERATORS.draw.default, (row.float(), *columns))
    if dtype is torch.bfloat16 and native.tier in PRODUCTS:
        check(OPERATORS.pack_weight.default, (row,))
        packed = OPERATORS.pack_weight(torch.randn(5, 32).bfloat16())
        check(OPERATORS.packed_linear.default, (row, packed, 5))
        check(OPERATORS.packed_linear.default, (row, packed, 5, True))
        check(OPERATORS.packed_embedding.default, (torch.tensor([4, 0]), packed, 5, row[0]))


def test_what_does_not_fit_is_refused(native: object) -> None:
    given = inputs(Case([(5, 1), (0, 6)]), torch.float32)
    qkv, pool, tables, starts, contexts, layer, scale = given.attention(1)
    attention = OPERATORS.paged_attention
    with pytest.raises(RuntimeError, match="row 0 reaches beyond"):
        attention(qkv, pool, tables, starts, contexts + 16, layer, scale)
    num_blocks = len(pool)
    with pytest.raises(RuntimeError, match=f"row 1 names block {num_blocks} of a pool of {num_blocks}"):
        attention(qkv, pool, tables.index_fill(0, torch.tensor([1]), num_blocks), starts, contexts, layer, scale)
    rotate = OPERATORS.rotate_and_store
    last = int(given.stored.max())
    for wrong in (-1, pool.numel() // pool.shape[-1] - 3 * pool.shape[-2]):  # the first row behind the last layer 0
        stored = given.stored.where(given.stored != last, wrong)
        with pytest.raises(RuntimeError, match=f"row {wrong} lies beyond the pool"):
            rotate(given.qkv, given.angles, given.positions, pool, stored, 1)
    with pytest.raises(RuntimeError, match="there is no layer 2"):
        attention(qkv, pool, tables, starts, contexts, 2, scale)
    with pytest.raises(RuntimeError, match="the pool must be"):
        attention(qkv, pool[:, :0], tables, starts, contexts, layer, scale)
    with pytest.raises(RuntimeError, match="another dtype"):
        attention(qkv, given.pool.bfloat16(), tables, starts, contexts, layer, scale)
    with pytest.raises(RuntimeError, match="only float32 and bfloat16"):
        OPERATORS.swiglu(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="weight does not fit"):
        OPERATORS.add_rms_norm(torch.ones(2, 4), None, torch.ones(3), 1e-5)
    with pytest.raises(RuntimeError, match="no angle for position 6"):
        OPERATORS.rotate_and_store(given.qkv, given.angles[:4], given.positions + 1, given.pool, given.stored, 1)
