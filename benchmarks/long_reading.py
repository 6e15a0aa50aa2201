"""A very long text read and a short answer written: python benchmarks/long_reading.py --shape llama-8b --tokens 500000

Random weights and random tokens: what is measured is time, and what the device and the host hold. --profile looks at
40 windows after a warm-up instead: which operations cost most, and how often the device was waited for.

Every token put away takes pinned memory (an 8B model: 131 kB). If pinning_s is large, several threads do it faster:
PYTORCH_CUDA_ALLOC_CONF=pinned_use_cuda_host_register:True,pinned_num_register_threads:8
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

import torch

import kvkeep
from kvkeep.model.shapes import of_shape

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
PINS = ("cudaHostAlloc", "cudaHostRegister")
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
    engine = kvkeep.Engine(model, WORDS, options.method, options.budget, piece=options.piece)
    if options.profile:
        profile(engine)
    else:
        print(json.dumps(vars(options) | run(engine, noise(engine, options.tokens), options.new)), flush=True)


def noise(engine: Any, tokens: int) -> torch.Tensor:
    words = engine.model.config.vocab_size
    return torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(0))


def run(engine: Any, ids: torch.Tensor, new: int) -> dict:
    settle(engine)
    weights, began, shown = allocated(), time.perf_counter(), [0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    def note(progress: Any) -> None:
        if progress.done * 10 // len(ids) > shown[0] or progress.done == len(ids):
            shown[0] = progress.done * 10 // len(ids)
            settle(engine)
            seconds = time.perf_counter() - began
            held = state(engine, weights)
            text = ", ".join(f"{name} {size:,}" for name, size in held.items())
            print(
                f"{progress.done:>9,} tokens  {seconds:7.1f} s  {progress.done / seconds:9,.0f} /s  {text}", flush=True
            )

    logits = engine.read(ids, note)
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
    """40 windows, once everything has been compiled, and enough is put away for a usual choice; half of them timed."""
    from torch.profiler import ProfilerActivity, profile

    window, layers = engine.method.recall.window or 256, engine.model.config.num_hidden_layers
    half, warm = 20 * window, -(-6 * engine.cache.budget // window) * window
    ids = noise(engine, warm + 2 * half)
    engine.feed(ids[:warm])
    settle(engine)
    began = time.perf_counter()
    engine.feed(ids[warm : warm + half])
    settle(engine)
    plain = time.perf_counter() - began
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as seen:
        engine.feed(ids[warm + half :])
        settle(engine)
    table, steps = seen.key_averages(), 20 * layers
    for order in ("self_cpu_time_total", *(["self_cuda_time_total"] if len(kinds) > 1 else [])):
        print(table.table(sort_by=order, row_limit=30, max_name_column_width=60))
    counts = {name: sum(event.count for event in table if event.key == name) for name in (*WAITS, *PINS)}
    counts["launches"] = sum(event.count for event in table if "LaunchKernel" in event.key)
    counts["aten"] = sum(event.count for event in table if event.key.startswith("aten::"))
    each = {name: round(count / steps, 2) for name, count in counts.items()}
    print(json.dumps({"ms_per_window_layer": round(plain * 1000 / steps, 3), "window_layers": steps, "each": each}))


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def settle(engine: Any) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
