"""A very long text read and a short answer written: python benchmarks/long_reading.py --shape llama-8b --tokens 500000

Random weights and random tokens: what is measured is time, and what the device and the host hold. --profile looks at a
few pieces after a warm-up instead, per layer of a window: its time, kernels by name, and Python functions by own time.

Every token put away takes pinned memory (an 8B model: 131 kB); pinning_s is how long reading waited for some.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import kvkeep
from kvkeep.model.random_models import of_shape

WARM = 8192  # tokens read and dropped before the clock runs: kernels are compiled once on a machine
PIECES = {"warm": 8, "timed": 6, "kernels": 2, "python": 2}  # that --profile reads, one after the other
WORDS = SimpleNamespace(decode=lambda ids, **_: "", convert_ids_to_tokens=list, eos_token_id=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--new", type=int, default=71)
    parser.add_argument("--method", default="actqkv")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--piece", type=int, help="tokens of a forward pass")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = of_shape(options.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    engine, first = (kvkeep.Engine(model, WORDS, options.method, options.budget, piece=options.piece) for _ in range(2))
    if options.profile:
        return profile(engine)
    warm = run(first, noise(first, min(options.tokens, WARM)), 4, quiet=True)
    del first
    found = run(engine, noise(engine, options.tokens), options.new)
    print(json.dumps(vars(options) | {"warm_s": warm["seconds"]} | found), flush=True)


def noise(engine: Any, tokens: int) -> torch.Tensor:
    words = engine.model.config.vocab_size
    return torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(0))


def run(engine: Any, ids: torch.Tensor, new: int, quiet: bool = False) -> dict:
    settle(engine)
    weights, began, shown = allocated(), time.perf_counter(), [0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    def note(progress: Any) -> None:
        if not quiet and (progress.done * 10 // len(ids) > shown[0] or progress.done == len(ids)):
            shown[0] = progress.done * 10 // len(ids)
            settle(engine)
            seconds = time.perf_counter() - began
            held = state(engine, weights)
            text = ", ".join(f"{name} {size:,}" for name, size in held.items())
            print(
                f"{progress.done:>9,} tokens  {seconds:7.1f} s  {progress.done / seconds:9,.0f} /s  {text}", flush=True
            )

    logits = engine.prefill(ids, note)
    settle(engine)
    reading = time.perf_counter() - began
    for _ in range(new):
        token = logits.argmax(-1, keepdim=True)
        logits = engine.feed(token)[-1]
    settle(engine)
    seconds = time.perf_counter() - began
    rounded = {
        "reading_s": round(reading, 2),
        "writing_s": round(seconds - reading, 2),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(len(ids) / reading, 1),
    }
    return rounded | state(engine, weights)


def state(engine: Any, weights: int) -> dict:
    """Keys and values on the device, now and at most; what is known of units; all but weights, at most; the host."""
    report, arenas = engine.cache.report(), engine.cache.purse.arenas.values()
    most = torch.cuda.max_memory_allocated() - weights if torch.cuda.is_available() else 0
    sizes = {
        "device_mb": report.bytes,
        "peak_mb": report.peak_bytes,
        "index_mb": report.index_bytes,
        "beside_weights_mb": most,
        "host_mb": report.host_bytes,
        "pinned_mb": sum(arena.made for arena in arenas),
    }
    rounded = {name: round(size / 1e6) for name, size in sizes.items()}
    return rounded | {"pinning_s": round(sum(arena.waited for arena in arenas), 1)}


def profile(engine: Any) -> None:
    """Three looks, none of which disturbs another: the clock alone, the device's kernels alone, Python alone."""
    window, layers = engine.method.recall.window or 256, engine.model.config.num_hidden_layers
    piece = engine._piece(1024)  # one pass
    ids = noise(engine, piece * sum(PIECES.values())).split(piece)
    steps = {part: count * -(-piece // window) * layers for part, count in PIECES.items()}  # layers of windows
    warm, timed, kernels = PIECES["warm"], PIECES["timed"], PIECES["kernels"]
    seconds, _ = read(engine, ids[:warm])
    print(f"warm-up, compilers included: {seconds:.1f} s", flush=True)
    seconds, sent = read(engine, ids[warm : warm + timed])
    print(f"{seconds * 1000 / steps['timed']:.3f} ms per layer of a window, {timed * piece / seconds:,.0f} tokens/s")
    print(f"all work was sent off after {sent / seconds:.0%} of that time: near 100 %, the processor is what is slow")
    if torch.cuda.is_available():
        show_kernels(engine, ids[warm + timed : warm + timed + kernels], steps["kernels"])
    show_python(engine, ids[warm + timed + kernels :], steps["python"])


def read(engine: Any, pieces: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Seconds, and those after which the device was given the last of its work."""
    settle(engine)
    began = time.perf_counter()
    for ids in pieces:
        engine.feed(ids)
    sent = time.perf_counter() - began
    settle(engine)
    return time.perf_counter() - began, sent


def show_kernels(engine: Any, pieces: Sequence[torch.Tensor], steps: int) -> None:
    """What ran on the device, most time first."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        read(engine, pieces)
    times: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1000)
    total, count = (sum(map(each, times.values())) / steps for each in (sum, len))
    print(f"\nper layer of a window: {count:.1f} launches, {total:.3f} ms on the device")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:15]:
        print(f"{sum(each) / steps:9.4f} ms  {len(each) / steps:6.2f} x  {name[:90]}")


def show_python(engine: Any, pieces: Sequence[torch.Tensor], steps: int) -> None:
    """Functions by their own time; what the profiler itself takes is in it."""
    watch = cProfile.Profile()
    watch.enable()
    read(engine, pieces)
    watch.disable()
    rows = sorted(pstats.Stats(watch).stats.items(), key=lambda item: -item[1][2])
    print(f"\nper layer of a window: {sum(row[2] for _, row in rows) * 1000 / steps:.3f} ms with cProfile watching")
    for (file, line, name), (_, calls, own, *_rest) in rows[:45]:
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name
        print(f"{own * 1e6 / steps:9.1f} us  {calls / steps:6.2f} x  {where[:90]}")


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def settle(engine: Any) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
