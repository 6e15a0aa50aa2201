"""Prefill of a very long text, decode of a short answer: benchmarks/long_prefill.py --shape llama-8b --length 500000

Random weights and random tokens: measured are time, and memory of device and host. --profile instead profiles a few
prefill chunks after a warm-up, per layer and retrieval window: time, kernels by name, Python functions by own time.

Every offloaded token takes pinned memory (an 8B model: 131 kB); pinning_s is how long prefill waited for some.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from characters import Characters

import kvkeep
from kvkeep.model.random_models import random_model

WARM = 8192  # tokens of an untimed prefill, which compiles the kernels
CHUNKS = {"warm": 8, "timed": 6, "kernels": 2, "python": 2}  # prefill chunks of --profile, one after the other


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--length", type=int, default=20_000)
    parser.add_argument("--max-new-tokens", type=int, default=71)
    parser.add_argument("--method", default="actqkv")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--prefill-chunk-size", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = random_model(options.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    chunk = {"prefill_chunk_size": options.prefill_chunk_size}
    engine, first = (kvkeep.Engine(model, Characters(), options.method, options.budget, **chunk) for _ in range(2))
    if options.profile:
        return profile(engine)
    warm = run(first, noise(first, min(options.length, WARM)), 4, quiet=True)
    del first
    found = run(engine, noise(engine, options.length), options.max_new_tokens)
    print(json.dumps(vars(options) | {"warm_s": warm["seconds"]} | found), flush=True)


def noise(engine: Any, tokens: int) -> torch.Tensor:
    words = engine.model.config.vocab_size
    return torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(0))


def run(engine: Any, ids: torch.Tensor, new: int, quiet: bool = False) -> dict:
    synchronize(engine)
    weights, began, shown = allocated(), time.perf_counter(), [0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    def note(progress: Any) -> None:
        if not quiet and (progress.done * 10 // len(ids) > shown[0] or progress.done == len(ids)):
            shown[0] = progress.done * 10 // len(ids)
            synchronize(engine)
            seconds = time.perf_counter() - began
            held = state(engine, weights)
            text = ", ".join(f"{name} {size:,}" for name, size in held.items())
            print(
                f"{progress.done:>9,} tokens  {seconds:7.1f} s  {progress.done / seconds:9,.0f} /s  {text}", flush=True
            )

    logits = engine.prefill(ids, note)
    synchronize(engine)
    prefill_s = time.perf_counter() - began
    for _ in range(new):
        token = logits.argmax(-1, keepdim=True)
        logits = engine.extend(token)[-1]
    synchronize(engine)
    seconds = time.perf_counter() - began
    rounded = {
        "prefill_s": round(prefill_s, 2),
        "decode_s": round(seconds - prefill_s, 2),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(len(ids) / prefill_s, 1),
    }
    return rounded | state(engine, weights)


def state(engine: Any, weights: int) -> dict:
    """Keys and values on the device and their peak; index; peak of all but the weights; host memory."""
    report, arenas = engine.cache.report(), engine.cache.host_budget.arenas.values()
    most = torch.cuda.max_memory_allocated() - weights if torch.cuda.is_available() else 0
    sizes = {
        "device_mb": report.bytes,
        "peak_mb": report.peak_bytes,
        "index_mb": report.index_bytes,
        "beside_weights_mb": most,
        "host_mb": report.host_bytes,
        "pinned_mb": sum(arena.allocated for arena in arenas),
    }
    rounded = {name: round(size / 1e6) for name, size in sizes.items()}
    return rounded | {"pinning_s": round(sum(arena.wait_seconds for arena in arenas), 1)}


def profile(engine: Any) -> None:
    """Three measurements that do not disturb each other: wall time, the device's kernels, Python."""
    window, layers = engine.method.retrieval.window or 256, engine.model.config.num_hidden_layers
    chunk = engine.config.chunk_size(1024)  # tokens of one pass
    ids = noise(engine, chunk * sum(CHUNKS.values())).split(chunk)
    steps = {part: count * -(-chunk // window) * layers for part, count in CHUNKS.items()}  # layers × retrieval windows
    warm, timed, kernels = CHUNKS["warm"], CHUNKS["timed"], CHUNKS["kernels"]
    seconds, _ = extend(engine, ids[:warm])
    print(f"warm-up, compilers included: {seconds:.1f} s", flush=True)
    seconds, sent = extend(engine, ids[warm : warm + timed])
    print(f"{seconds * 1000 / steps['timed']:.3f} ms per layer and window, {timed * chunk / seconds:,.0f} tokens/s")
    print(f"all kernels were launched after {sent / seconds:.0%} of that time: near 100 %, the CPU is the bottleneck")
    if torch.cuda.is_available():
        show_kernels(engine, ids[warm + timed : warm + timed + kernels], steps["kernels"])
    show_python(engine, ids[warm + timed + kernels :], steps["python"])


def extend(engine: Any, chunks: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Seconds, and those after which the last kernel was launched."""
    synchronize(engine)
    began = time.perf_counter()
    for ids in chunks:
        engine.extend(ids)
    sent = time.perf_counter() - began
    synchronize(engine)
    return time.perf_counter() - began, sent


def show_kernels(engine: Any, chunks: Sequence[torch.Tensor], steps: int) -> None:
    """Kernels on the device, most time first."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        extend(engine, chunks)
    times: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1000)
    total, count = (sum(map(each, times.values())) / steps for each in (sum, len))
    print(f"\nper layer and window: {count:.1f} launches, {total:.3f} ms on the device")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:15]:
        print(f"{sum(each) / steps:9.4f} ms  {len(each) / steps:6.2f} x  {name[:90]}")


def show_python(engine: Any, chunks: Sequence[torch.Tensor], steps: int) -> None:
    """Functions by their own time, the profiler's included."""
    profiler = cProfile.Profile()
    profiler.enable()
    extend(engine, chunks)
    profiler.disable()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])
    print(f"\nper layer and window: {sum(row[2] for _, row in rows) * 1000 / steps:.3f} ms with cProfile on")
    for (file, line, name), (_, calls, own, *_rest) in rows[:45]:
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name
        print(f"{own * 1e6 / steps:9.1f} us  {calls / steps:6.2f} x  {where[:90]}")


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize(engine: Any) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
