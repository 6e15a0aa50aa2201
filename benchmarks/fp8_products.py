"""Linear products in 8-bit floats beside bfloat16, on a GPU: python benchmarks/fp8_products.py

One JSON line for each product of Llama-3.1-8B and number of tokens, with microseconds of: the bfloat16 product, torch's
product of scaled rows, that with one scale in all, and for few tokens our kernel with several tiles; and one for each
operation that gives a product its input, in bfloat16 and quantized. Each is captured 20 times in a CUDA graph, with
weights that do not stay in the GPU's cache between two of them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvkeep.bench.timing import min_seconds
from kvkeep.kernels.torch import fp8 as reference
from kvkeep.kernels.torch.fp8 import Fp8Rows
from kvkeep.kernels.triton import fp8_product, fp8_rows, layer_ops
from kvkeep.model.cuda_graph import capture_graph

PRODUCTS = {  # name -> input and output channels
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
TOKENS = 1, 16, 64, 8192
FEW_TOKENS = 64  # for our kernel
HEAD_TOKENS = 64  # logits are computed for the tokens that are shown
TIMES = 20  # in a graph
CACHED = 150_000_000  # bytes of weights that no cache of a GPU holds
TILES = (16, 4, 128, 5), (32, 2, 128, 5), (64, 1, 256, 4), (32, 4, 128, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in options.products:
            for tokens in options.tokens:
                if name != "head" or tokens <= HEAD_TOKENS:
                    show({"product": name, "tokens": tokens} | product(*PRODUCTS[name], tokens))
        for tokens in options.tokens:
            for operation, microseconds in inputs(tokens).items():
                show({"input": operation, "tokens": tokens} | microseconds)


def show(line: dict[str, Any]) -> None:
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()}))


def product(dim: int, outs: int, tokens: int) -> dict[str, Any]:
    """Microseconds of every way, and how far the quantized ones are from their reference."""
    copies = max(1, CACHED // (dim * outs))
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, device="cuda")
    wide = [torch.randn(outs, dim, dtype=torch.bfloat16, device="cuda") / dim**0.5 for _ in range(copies)]
    found: dict[str, Any] = {"bf16_us": timed(lambda turn: linear(x, wide[turn % copies]))}
    rows, weights = fp8_rows.quantize_rows(x), [fp8_rows.quantize_rows(each) for each in wide]
    one = torch.ones((), device="cuda")
    ways = {"rowwise_us": by_torch(rows, weights, None), "tensorwise_us": by_torch(rows, weights, one)}
    if tokens <= FEW_TOKENS:
        ways |= {f"tiles_{'_'.join(map(str, tiles))}_us": by_kernel(rows, weights, tiles) for tiles in TILES}
    for name, way in ways.items():
        try:
            found[name] = timed(way)
        except Exception as error:  # tiles that do not fit, a product that this torch lacks
            found[name] = str(error).splitlines()[0]
    few = slice(0, 8)
    want = reference.fp8_linear(Fp8Rows(rows.numbers[few], rows.scale[few], torch.float32), weights[0])
    got = fp8_product.fp8_linear(rows, weights[0])[few].float()
    return found | {"off": float((got - want).abs().max() / want.abs().max())}


def by_torch(rows: Fp8Rows, weights: list[Fp8Rows], one: Tensor | None) -> Callable[[int], Tensor]:
    """one: the scale in all; None: one for each row"""

    def run(turn: int) -> Tensor:
        weight = weights[turn % len(weights)]
        scales = (rows.scale, weight.scale.view(1, -1)) if one is None else (one, one)
        how: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(rows.numbers, weight.numbers.t(), *scales, **how)

    return run


def by_kernel(rows: Fp8Rows, weights: list[Fp8Rows], tiles: tuple[int, int, int, int]) -> Callable[[int], Tensor]:
    output = torch.empty(len(rows.numbers), len(weights[0].numbers), dtype=torch.bfloat16, device="cuda")

    def run(turn: int) -> Tensor:
        weight = weights[turn % len(weights)]
        fp8_product.few_rows(rows.numbers, rows.scale, weight, None, output, False, tiles)
        return output

    return run


def inputs(tokens: int) -> dict[str, dict[str, float]]:
    """Microseconds in bfloat16, quantized in the same kernel, and for a plain row with torch's operations."""
    x, wide = (torch.randn(tokens, dim, dtype=torch.bfloat16, device="cuda") for dim in (4096, 28672))
    weight, (gate, up) = torch.rand(4096, dtype=torch.bfloat16, device="cuda"), wide.chunk(2, -1)
    return {
        "norm": {
            "bf16_us": timed(lambda _: layer_ops.rms_norm(x, weight, 1e-5)),
            "fp8_us": timed(lambda _: fp8_rows.rms_norm_quantized(x, weight, 1e-5)),
        },
        "gated": {
            "bf16_us": timed(lambda _: layer_ops.gated(gate, up, "silu")),
            "fp8_us": timed(lambda _: fp8_rows.gated_quantized(gate, up, "silu")),
        },
        "row": {
            "torch_us": timed(lambda _: reference.quantize_rows(x)),
            "fp8_us": timed(lambda _: fp8_rows.quantize_rows(x)),
        },
    }


def timed(run: Callable[[int], Any]) -> float:
    """Microseconds of one run, which is told its number, among TIMES in a graph."""

    def all_runs() -> Tensor:
        for turn in range(TIMES):
            last = run(turn)
        return last

    graph, _ = capture_graph(all_runs, 1)
    return min_seconds(torch.device("cuda"), graph.replay) / TIMES * 1e6


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
