"""What evicting by votes costs of a decode step of a layer, on a GPU: python benchmarks/votes.py [--rows 16 64]

Ten calls in one CUDA graph, of full rows: where the log-sum-exps of the window's queries are known, as in all steps but
a row's first, and where they are computed anew; and what each kernel takes of a call. Attention, which writes those of
the newest queries in an engine's step, is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvkeep.kernels.torch.votes import VoteRule
from kvkeep.kernels.triton.evict_voted import evict_voted

CALLS, ROOM = 10, 129  # calls in a graph; tokens that a KV head may grow by


class Layer:
    """Full rows of one layer, random."""

    def __init__(self, rows: int, options: argparse.Namespace) -> None:
        heads, held = options.kv_heads * options.group, torch.arange(options.budget, dtype=torch.int32, device="cuda")
        segments, size = rows * options.kv_heads, options.budget + ROOM
        self.rule = VoteRule(options.budget, options.budget // 5, options.window, 0, options.window, 5, "avg")
        self.keys, self.values = (drawn(segments * size + 1, options.dim) for _ in range(2))
        self.order, self.positions = torch.zeros(2, segments * size + 1, dtype=torch.int32, device="cuda")
        self.starts = (torch.arange(segments, device="cuda") * size).view(rows, -1)
        self.lengths = torch.full((rows, options.kv_heads), options.budget, device="cuda")
        for index in (self.order, self.positions):
            index[:-1].view(segments, size)[:, : options.budget] = held
        self.queries = drawn(rows, options.window + 2, heads, options.dim)
        self.seen = torch.full((rows,), 2 * options.budget, device="cuda")
        self.lse = torch.zeros(rows, heads, options.window + 2, device="cuda")
        self.known = torch.zeros(rows, options.kv_heads, dtype=torch.int32, device="cuda")
        self.longest, self.scale = 2 * options.budget, options.dim**-0.5

    def step(self) -> None:
        self.lengths.add_(1)
        self.seen.add_(1)
        tokens = self.keys, self.values, self.order, self.positions, self.starts, self.lengths
        voting = self.queries, self.seen, self.lse, self.known
        evict_voted(*tokens, *voting, self.longest, self.rule, self.scale)

    def stale_step(self) -> None:
        self.known.zero_()
        self.step()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            step()
    return graph


def measure(graph: Any) -> float:
    """-> microseconds of a call"""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    torch.cuda.synchronize()
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 3 / CALLS * 1000


def kernel_times(graph: Any) -> dict[str, float]:
    """-> microseconds of a call, by kernel"""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us() / CALLS
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    for name, usual in (("budget", 1024), ("kv-heads", 8), ("group", 4), ("dim", 128), ("window", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    torch.manual_seed(0)
    for rows in options.rows:
        for name in ("step", "stale_step"):
            layer = Layer(rows, options)
            graph = captured(getattr(layer, name))
            print(f"{rows} rows, {name}: {measure(graph):.1f} µs a call", flush=True)
            for kernel, each in sorted(kernel_times(graph).items(), key=lambda item: -item[1])[:8]:
                print(f"    {each:8.1f} µs  {kernel[:80]}")
            print(f"    known of {layer.known.float().mean():.1%}, held {layer.lengths.float().mean():.1f}")


if __name__ == "__main__":
    main()
