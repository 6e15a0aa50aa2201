"""Rows in 8-bit floats and their products on random and edge shapes, beside plain loops in float64."""

import pytest
import torch
from decode_cases import DEVICE, drawn, off, pairs
from layer_ops_cases import NORMS, plain_gate, plain_norm
from oracles import fp8 as oracle

from kvkeep.kernels.torch import elementwise
from kvkeep.kernels.torch import fp8 as reference
from kvkeep.kernels.triton import fp8_product, fp8_rows, layer_ops

BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
ROWS = [reference, fp8_rows]
UNFUSED = {reference: elementwise, fp8_rows: layer_ops}


def check_rows(got, exact, kind, slack):
    """Whether these are the rows of these numbers, but for a relative error of them."""
    assert got.numbers.dtype == reference.E4M3 and got.scale.dtype == torch.float32 and got.dtype == kind
    assert got.numbers.shape == exact.shape and got.scale.shape == (*exact.shape[:-1], 1)
    numbers, scales = got.numbers.double().cpu().reshape(-1, exact.shape[-1]), got.scale.double().flatten().tolist()
    for mine, scale, row in zip(numbers.tolist(), scales, exact.reshape(-1, exact.shape[-1]).tolist(), strict=True):
        want = oracle.quantize(row)[1]
        assert abs(scale - want) <= slack * want
        assert all(oracle.is_rounded(one, x / want, 2 * slack) for one, x in zip(mine, row, strict=True))


def check_fused(got, unfused):
    """On a GPU, two kernels may add up in another order, or round a product with a sum once."""
    differ = (got.numbers.float() != unfused.numbers.float()).double().mean()
    assert differ <= (0.01 if DEVICE == "cuda" else 0) and off(got.scale, unfused.scale) < 2 * BOUND[got.dtype]


@pytest.mark.parametrize("module", ROWS)
@pytest.mark.parametrize(
    "shape, kind, scale", pairs([(1, 1), (5, 48), (2, 3, 40), (3, 4100), (70, 16)], BOUND, [1.0, 300.0, 1e-6]), ids=str
)
def test_quantize_rows(module, shape, kind, scale):
    torch.manual_seed(len(shape))
    x = drawn(*shape[:-1], 2 * shape[-1], scale=scale)
    x[..., ::7] *= 1e-3  # such that steps below 2**-6 count
    x[0, ..., :] = 0
    for part in (x[..., : shape[-1]].contiguous().to(kind), x.to(kind)[..., shape[-1] :]):
        check_rows(module.quantize_rows(part), part.double().cpu(), kind, 1e-6)


@pytest.mark.parametrize("module", ROWS)
def test_every_tie_and_every_number_of_e4m3(module):
    """With a largest number of 448, rows are divided by one."""
    ties = [(one + other) / 2 for one, other in zip(oracle.VALUES, oracle.VALUES[1:], strict=False)]
    beside = [x * (1 + sign * 2.0**-20) for x in ties for sign in (1, -1)]
    row = [*oracle.VALUES, *ties, *beside]
    x = torch.tensor([row, [-each for each in row]], device=DEVICE)
    got = module.quantize_rows(x)
    assert got.scale.flatten().tolist() == [1, 1]
    assert got.numbers.float().tolist() == [[oracle.nearest(each) for each in part] for part in x.tolist()]


@pytest.mark.parametrize("module", ROWS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_no_number_stays_in_its_row(module, wrong):
    x = drawn(3, 40)
    x[1, 7] = wrong
    weight = reference.quantize_rows(drawn(16, 40))
    got = reference.fp8_linear(module.quantize_rows(x), weight)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("module", ROWS)
@pytest.mark.parametrize("shape, kind, how", pairs([(1, 1, 16), (2, 5, 48), (3, 4100)], BOUND, NORMS), ids=str)
def test_rms_norm_quantized(module, shape, kind, how):
    torch.manual_seed(len(shape))
    x, weight = drawn(*shape, kind=kind, scale=3.0), drawn(shape[-1], kind=kind)
    got = module.rms_norm_quantized(x, weight, 1e-3, *how)
    check_rows(got, plain_norm(x.cpu(), weight.cpu(), 1e-3, how[0]), kind, 2 * BOUND[kind])
    check_fused(got, module.quantize_rows(UNFUSED[module].rms_norm(x, weight, 1e-3, *how)))


@pytest.mark.parametrize("module", ROWS)
@pytest.mark.parametrize(
    "shape, kind, activation",
    pairs([(1, 1, 16), (2, 3, 40), (3, 2050), (1, 2, 4096)], BOUND, elementwise.ACTIVATIONS),
    ids=str,
)
def test_gated_quantized(module, shape, kind, activation):
    torch.manual_seed(len(shape))
    both = drawn(*shape[:-1], 2 * shape[-1], kind=kind, scale=3.0)
    gate, up = both.chunk(2, -1)
    got = module.gated_quantized(gate, up, activation)
    check_rows(got, plain_gate(gate.cpu(), up.cpu(), activation), kind, 2 * BOUND[kind])
    check_fused(got, module.quantize_rows(UNFUSED[module].gated(gate, up, activation)))


def pairs_of(rows):
    return list(zip(rows.numbers.double().tolist(), rows.scale.double().flatten().tolist(), strict=True))


@pytest.mark.parametrize("module", [reference, fp8_product])
@pytest.mark.parametrize(
    "shape, kind, biased, adds",
    pairs([(1, 16, 16), (3, 48, 32), (16, 528, 48), (17, 32, 16), (33, 64, 80), (70, 48, 32)], BOUND, [0, 1], [0, 1]),
    ids=str,
)
def test_fp8_linear(module, shape, kind, biased, adds):
    (rows, dim, outs), _ = shape, torch.manual_seed(sum(shape))
    x, weight = (reference.quantize_rows(drawn(n, dim, kind=kind)) for n in (rows, outs))
    bias, total = drawn(outs, kind=kind) if biased else None, drawn(1, rows, outs, kind=kind) if adds else None
    products = oracle.linear(pairs_of(x), pairs_of(weight), bias.double().tolist() if biased else None)
    want = torch.tensor(products, dtype=torch.float64) + (total[0].cpu().double() if adds else 0)
    x = x._replace(numbers=x.numbers[None], scale=x.scale[None])
    got = module.fp8_linear(x, weight, bias, total)
    assert got.dtype == kind and got.shape == (1, rows, outs) and (not adds or got is total)
    slack = 2e-3 if DEVICE == "cuda" else 0  # a tensor core sums with fewer digits
    assert off(got[0].cpu().double(), want) < 2 * BOUND[kind] + slack  # the interpreter rounds towards zero


def test_nothing_is_computed_for_no_tokens():
    for empty in (torch.empty(1, 0, 16, device=DEVICE), torch.empty(0, 16, device=DEVICE)):
        rows = fp8_rows.quantize_rows(empty)
        assert rows.numbers.shape == empty.shape and rows.scale.shape == (*empty.shape[:-1], 1)
        weight = reference.quantize_rows(drawn(32, 16))
        assert fp8_product.fp8_linear(rows, weight).shape == (*empty.shape[:-1], 32)
