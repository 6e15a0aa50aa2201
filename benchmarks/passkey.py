"""A number hidden in ever longer noise: python benchmarks/passkey.py --methods actqkv infllm --lengths 8192 65536

Prints what was answered, the time, what the cache held on the device and put away, and how much the process grew while
it read; --json keeps the memory after every piece, --plot draws it (pip install matplotlib).
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
from kvkeep.model.load import hush, load

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
    parser.add_argument("--methods", nargs="+", default=["actqkv", "infllm"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--write", type=int, default=24, help="tokens of an answer, at most")
    parser.add_argument("--depth", type=float, default=0.5)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    hush()
    model, tokenizer = load(options.model, device=options.device)
    rows = []
    for method in options.methods:
        for length in options.lengths:
            for sample in range(options.samples):
                rows.append(run(model, tokenizer, method, length, sample, options))
                shown = {k: v for k, v in rows[-1].items() if k != "pieces"}
                print(json.dumps(shown), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows))
    if options.plot:
        plot(rows, options.plot)


def run(model: Any, tokenizer: Any, method: str, length: int, sample: int, options: argparse.Namespace) -> dict:
    key = random.Random(sample).randint(10**6, 10**7 - 1)
    engine = kvkeep.Engine(model, tokenizer, method, options.budget)
    pieces: list[dict] = []
    began = time.perf_counter()

    def note(progress: Any) -> None:
        report = engine.cache.report()
        pieces.append({
            "tokens": progress.done, "seconds": progress.seconds, "rss": rss(), "host": report.host_bytes,
            "device": report.bytes, "index": report.index_bytes,
            "gpu": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        })  # fmt: skip

    words = text(tokenizer, length, key, options.depth)
    answer = engine.generate(words, question=QUESTION, max_new_tokens=options.write, progress=note)
    seconds, reading = time.perf_counter() - began, pieces[-1]["seconds"]
    return {
        "method": method,
        "tokens": pieces[-1]["tokens"],
        "found": str(key) in answer,
        "answer": answer,
        "written": len(engine.answer.ids),
        "seconds": round(seconds, 1),
        "reading_s": round(reading, 1),
        "writing_s": round(seconds - reading, 1),
        "device_mb": round(max(p["device"] for p in pieces) / 1e6, 1),
        "index_mb": round(pieces[-1]["index"] / 1e6, 1),
        "host_mb": round(pieces[-1]["host"] / 1e6, 1),
        "rss_beyond_host_mb": round(
            (pieces[-1]["rss"] - pieces[-1]["host"] - pieces[0]["rss"] + pieces[0]["host"]) / 1e6
        ),
        "pieces": pieces,
    }


def plot(rows: list[dict], path: Path) -> None:
    """Memory while the longest text is read: what grows is put away, what is attended to stays."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    length = max(row["tokens"] for row in rows)
    for row, style in zip((row for row in rows if row["tokens"] == length), ("-", "--", ":"), strict=False):
        tokens = [piece["tokens"] / 1000 for piece in row["pieces"]]
        for part, colour, name in (
            ("host", "C0", "put away"),
            ("device", "C3", "attended to"),
            ("index", "C2", "index"),
        ):
            size = [piece[part] / 1e6 for piece in row["pieces"]]
            axes.plot(tokens, size, style, color=colour, label=f"{name}, {row['method']}")
    axes.set(xlabel="thousand tokens read", ylabel="MB", yscale="log", ylim=(0.3, 6000))
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
