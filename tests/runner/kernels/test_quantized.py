"""Products of quantised matrices on every set of instructions that this CPU has.

Within a group everything is whole numbers, so against the reference only the order of float32 additions differs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runner.kernels import reference
from runner.kernels.cpu.backend import CpuKernels
from runner.kernels.packed import PackedMatrix, pack, unpacked
from runner.weights.quantized import QuantizedMatrix

OPERATORS = torch.ops.kvyard
Form = tuple[int, int, bool]  # bits, group, minima
FORMS: dict[str, Form] = {
    "Q4_0": (4, 32, False),
    "Q4_1, Q4_K": (4, 32, True),
    "Q8_0": (8, 32, False),
    "Q6_K": (8, 16, False),
}
SHAPES = [(576, 576), (100, 64), (7, 32), (33, 1536)]
ROWS = (1, 2, 3, 4, 5, 7, 13, 70)
DTYPES = (torch.float32, torch.bfloat16)

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@pytest.fixture
def threads(native: CpuKernels) -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_matrix(form: Form, outputs: int, inputs: int, seed: int = 0) -> QuantizedMatrix:
    """Scales of which float16 has every bit, some of them below its normal numbers."""
    bits, group, has_minima = form
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales, minima = torch.randn(2, outputs, inputs // group, generator=generator) * 0.02
    scales[::5] *= 1e-4
    return QuantizedMatrix(codes, scales.half().float(), minima.half().float() if has_minima else None, bits, group)


def form_of(matrix: PackedMatrix) -> Form:
    return matrix.bits, matrix.group, matrix.has_minima


def product(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    result: torch.Tensor = OPERATORS.quantized_linear(x, matrix.panels, matrix.outputs, *form_of(matrix))
    return result


@every_form
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 32), (2053, 64)], ids=str)
def test_packing_loses_nothing(form: Form, outputs: int, inputs: int) -> None:
    matrix = random_matrix(form, outputs, inputs)
    packed = pack(matrix)
    assert form_of(packed) == form
    assert packed.panels.shape[1] % 64 == 0
    numbers = unpacked(packed.panels, inputs, *form).flatten(0, 1)
    assert torch.equal(numbers[:outputs], matrix.dequantized())
    assert not numbers[outputs:].any()


def test_how_a_panel_lies() -> None:
    """By the picture in packed.py, byte by byte: output 3, input 13 is in the second 64 bytes, an upper half."""
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[3, 13] = 9
    minima = torch.full((16, 1), -2.0)
    panel = pack(QuantizedMatrix(codes, torch.ones(16, 1), minima, 4, 32)).panels[0]
    assert panel.nonzero().flatten().tolist()[0] == 64 + 3 * 4 + 1
    assert panel[64 + 13] == 9 << 4
    assert panel[256:288].view(torch.float16).tolist() == [1.0] * 16
    assert panel[288:320].view(torch.float16).tolist() == [-2.0] * 16
    wide = codes + 128
    panel = pack(QuantizedMatrix(wide, torch.ones(16, 1), None, 8, 32)).panels[0]
    assert panel[3 * 64 + 3 * 4 + 1] == 128 + 9
    assert panel[512:544].view(torch.float16).tolist() == [1.0] * 16


@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_numbers_are_multiplied_exactly(form: Form, dtype: torch.dtype, quantized_tier: str) -> None:
    """Where each group of activations reaches 127 and scales are powers of two, the result is that of integers.

    Codes and activations at both ends of their range: 16-bit sums on the way would overflow.
    """
    bits, group, has_minima = form
    outputs, inputs = 37, 96
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    codes[:2] = torch.tensor([[0], [(1 << bits) - 1]])
    scales = 2.0 ** torch.randint(-4, 1, (outputs, inputs // group), generator=generator)
    minima = -torch.randint(0, 8, (outputs, inputs // group), generator=generator).float() if has_minima else None
    matrix = QuantizedMatrix(codes, scales, minima, bits, group)
    x = torch.randint(-127, 128, (6, inputs), generator=generator).float()
    x[:, ::32] = 127
    x[0], x[1] = 127, -127
    exact = (x.double() @ matrix.dequantized().double().T).to(dtype)
    assert torch.equal(product(x.to(dtype), pack(matrix)), exact)


@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES, ids=str)
def test_product(form: Form, dtype: torch.dtype, outputs: int, inputs: int, quantized_tier: str) -> None:
    """Sums of up to 48 groups in float32: within 2e-6 of the largest result; then half a unit of bfloat16, 2^-9."""
    matrix = pack(random_matrix(form, outputs, inputs))
    x = torch.randn(ROWS[-1], inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = reference.quantized_linear(x.float(), matrix.panels, outputs, *form)
    bound = {"rtol": 0.0 if dtype is torch.float32 else 2**-8, "atol": 2e-6 * float(expected.abs().max())}
    for rows in ROWS:
        torch.testing.assert_close(product(x[-rows:], matrix).float(), expected[-rows:], **bound)


@every_form
def test_how_far_from_the_weights_themselves(form: Form, quantized_tier: str) -> None:
    """Each activation is rounded by at most half of a 127th of its group's largest; nothing else is lost."""
    matrix = random_matrix(form, 64, 320)
    x = torch.randn(9, 320, generator=torch.Generator().manual_seed(1))
    x[:, 7] *= 50  # an outlier costs its own group only
    weight = matrix.dequantized().double()
    rounding = x.double().view(9, 10, 32).abs().amax(-1).repeat_interleave(32, 1) / 254
    bound = rounding @ weight.abs().T + 1e-6
    error = (product(x, pack(matrix)).double() - x.double() @ weight.T).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-4  # that they are rounded at all


@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_company(
    form: Form, dtype: torch.dtype, quantized_tier: str, threads: None
) -> None:
    """To the bit: in any number of rows, on any number of threads."""
    matrix = pack(random_matrix(form, 600, 576))
    rows = torch.randn(75, 576, generator=torch.Generator().manual_seed(3)).to(dtype)
    together = product(rows, matrix)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 33):
        torch.set_num_threads(1 + count % 3)
        assert torch.equal(product(rows[7 : 7 + count], matrix), together[7 : 7 + count]), count


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(value: float, quantized_tier: str) -> None:
    """In its own row; the others are as they were."""
    matrix = pack(random_matrix(FORMS["Q8_0"], 20, 64))
    x = torch.ones(3, 64)
    expected = product(x, matrix)
    x[1, 40] = value
    got = product(x, matrix)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    assert reference.quantized_linear(x, matrix.panels, 20, *FORMS["Q8_0"])[1].isnan().all()


@pytest.mark.parametrize("value", [0.0, 1e-36, 1e-42])
def test_groups_of_next_to_nothing_are_zero(value: float, quantized_tier: str) -> None:
    """127 over less than 4e-37 is infinite."""
    for form in FORMS.values():
        matrix = pack(random_matrix(form, 20, 64))
        x = torch.full((1, 64), value)
        assert not product(x, matrix).any()
        assert not reference.quantized_linear(x, matrix.panels, 20, *form).any()


@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(form: Form, dtype: torch.dtype, native: CpuKernels) -> None:
    matrix = random_matrix(form, 50, 96)
    panels = pack(matrix).panels
    token_ids = torch.tensor([0, 49, 15, 16, 17, 16])
    like = torch.empty(96, dtype=dtype)
    expected = matrix.dequantized()[token_ids].to(dtype)
    for look_up in (OPERATORS.quantized_embedding, reference.quantized_embedding):
        assert torch.equal(look_up(token_ids, panels, like, *form), expected)
    with pytest.raises(RuntimeError, match="there is no token 64"):
        OPERATORS.quantized_embedding(torch.tensor([64]), panels, like, *form)


@every_form
def test_torch_accepts_the_operators(form: Form, native: CpuKernels) -> None:
    panels = pack(random_matrix(form, 20, 64)).panels
    for dtype in DTYPES:
        x, like = torch.randn(3, 64).to(dtype), torch.empty(64, dtype=dtype)
        torch.library.opcheck(OPERATORS.quantized_linear.default, (x, panels, 20, *form))
        torch.library.opcheck(OPERATORS.quantized_embedding.default, (torch.tensor([3, 19]), panels, like, *form))


def test_what_does_not_fit_is_refused(native: CpuKernels) -> None:
    panels, form = pack(random_matrix(FORMS["Q4_0"], 20, 64)).panels, FORMS["Q4_0"]
    with pytest.raises(RuntimeError, match="the packed weight does not fit"):
        OPERATORS.quantized_linear(torch.ones(1, 96), panels, 20, *form)
    with pytest.raises(RuntimeError, match="the packed weight does not fit"):
        OPERATORS.quantized_linear(torch.ones(1, 64), panels, 33, *form)
    with pytest.raises(RuntimeError, match="the packed weight does not fit"):
        OPERATORS.quantized_linear(torch.ones(1, 64), panels, 20, 4, 32, True)
    with pytest.raises(RuntimeError, match="no products with codes of 5 bits in groups of 32"):
        OPERATORS.quantized_linear(torch.ones(1, 64), panels, 20, 5, 32, False)
    with pytest.raises(RuntimeError, match="only float32 and bfloat16"):
        OPERATORS.quantized_linear(torch.ones(1, 64).double(), panels, 20, *form)
