"""Does memory stay flat while 2,000 tokens are decoded? python benchmarks/long_generation.py [--methods h2o snapkv]

Every method with a schedule of its own keeps it; the others evict every 128 steps. The bound is checked after every
step; every 250 steps the memory in use is measured: of the GPU where there is one, else of the process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import kvkeep
from kvkeep.model.load import load, quiet_transformers

BUFFER = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=[name for name in kvkeep.methods if name != "full"])
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    options = parser.parse_args()
    quiet_transformers()
    model, _ = load(options.model, device=options.device)
    print(f"{options.length} tokens of prompt, {options.steps} decoded, budget {options.budget}")
    heads = f"{'method':14} {'every':>6} {'most kept':>10} {'allowed':>8} {'most MB':>8} {'MB at end':>10}"
    print(f"{heads} {'in use grew':>12}")
    for name in options.methods:
        print(line(model, name, options), flush=True)


def line(model, name: str, options: argparse.Namespace) -> str:
    own = kvkeep.methods[name].schedule.every
    cache = kvkeep.Cache(model, name, options.budget, schedule=None if own else BUFFER)
    allowed = options.budget + (0 if own else BUFFER - 1)
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, options.length)).to(model.device)
    kept, sizes, resident = [], [], []
    with torch.inference_mode():
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        for step in range(options.steps):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            report = cache.report()
            kept.append(report.kept_per_head)
            sizes.append(report.bytes + report.index_bytes)
            assert kept[-1] <= allowed, f"{name} held {kept[-1]} at step {step}"
            if step % 250 == 249:
                resident.append(in_use(model.device))
    grew = (resident[-1] - resident[0]) / 1e6
    return (
        f"{name:14} {own or BUFFER:6} {max(kept):10.1f} {allowed:8} {max(sizes) / 1e6:8.1f} {sizes[-1] / 1e6:10.1f} "
        f"{grew:+9.1f} MB"
    )


def in_use(device: torch.device) -> int:
    """Bytes of live tensors on a GPU; without one, what this process holds in memory (Linux)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
