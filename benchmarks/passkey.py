"""A number hidden in ever longer noise: python benchmarks/passkey.py --methods actqkv,infllm --length 8192,65536

Prints the answer, the time, the cache on the device and what it offloaded, and how much the process grew during
prefill; --out keeps the memory after every prefill chunk, --plot draws it (pip install matplotlib).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

import kvkeep
from kvkeep.model.load import load, quiet_transformers

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The special magic number is {key}. "
QUESTION = "What is the special magic number mentioned in the text? Answer with the number."


def text(tokenizer: Any, tokens: int, key: int, depth: float) -> str:
    count = tokens // len(tokenizer(NOISE).input_ids)
    before = int(count * depth)
    return NOISE * before + NEEDLE.format(key=key) + NOISE * (count - before)


def rss() -> int:
    """Bytes this process holds in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["actqkv", "infllm"])
    parser.add_argument("--length", type=lambda text: [*map(int, text.split(","))], default=[8192, 16384, 32768, 65536])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--depth", type=float, default=0.5)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    quiet_transformers()
    model, tokenizer = load(options.model, device=options.device)
    rows = []
    for method in options.methods:
        for length in options.length:
            for sample in range(options.samples):
                rows.append(run(model, tokenizer, method, length, sample, options))
                shown = {k: v for k, v in rows[-1].items() if k != "chunks"}
                print(json.dumps(shown), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows))
    if options.plot:
        plot(rows, options.plot)


def run(model: Any, tokenizer: Any, method: str, length: int, sample: int, options: argparse.Namespace) -> dict:
    key = random.Random(sample).randint(10**6, 10**7 - 1)
    engine = kvkeep.Engine(model, tokenizer, method, options.budget)
    chunks: list[dict] = []
    began = time.perf_counter()

    def note(progress: Any) -> None:
        report = engine.cache.report()
        chunks.append({
            "tokens": progress.done, "seconds": progress.seconds, "rss": rss(), "host": report.host_bytes,
            "device": report.bytes, "index": report.index_bytes,
            "gpu": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        })  # fmt: skip

    words = text(tokenizer, length, key, options.depth)
    answer = engine.generate(words, question=QUESTION, max_new_tokens=options.max_new_tokens, progress=note)
    seconds, prefill_s, last = time.perf_counter() - began, chunks[-1]["seconds"], chunks[-1]
    return {
        "method": method,
        "tokens": last["tokens"],
        "found": str(key) in answer,
        "answer": answer,
        "new_tokens": len(engine.answer.ids),
        "seconds": round(seconds, 1),
        "prefill_s": round(prefill_s, 1),
        "decode_s": round(seconds - prefill_s, 1),
        "device_mb": round(max(chunk["device"] for chunk in chunks) / 1e6, 1),
        "index_mb": round(last["index"] / 1e6, 1),
        "host_mb": round(last["host"] / 1e6, 1),
        "rss_beyond_host_mb": round((last["rss"] - last["host"] - chunks[0]["rss"] + chunks[0]["host"]) / 1e6),
        "chunks": chunks,
    }


def plot(rows: list[dict], path: Path) -> None:
    """Memory in the prefill of the longest text: what grows is offloaded, what is attended to stays."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    length = max(row["tokens"] for row in rows)
    for row, style in zip((row for row in rows if row["tokens"] == length), ("-", "--", ":"), strict=False):
        tokens = [chunk["tokens"] / 1000 for chunk in row["chunks"]]
        for part, colour, name in (
            ("host", "C0", "offloaded"),
            ("device", "C3", "attended to"),
            ("index", "C2", "index"),
        ):
            size = [chunk[part] / 1e6 for chunk in row["chunks"]]
            axes.plot(tokens, size, style, color=colour, label=f"{name}, {row['method']}")
    axes.set(xlabel="thousand tokens prefilled", ylabel="MB", yscale="log", ylim=(0.3, 6000))
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
