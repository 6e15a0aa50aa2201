"""H2O over a very long prompt on a GPU, without the square matrix: python benchmarks/h2o_128k.py [--tokens 131072]

Random weights with the layer shape of Llama-3.1-8B; time and peak memory of the prefill with and without H2O.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    shape = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    if options.device == "cpu":
        shape = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**shape, num_hidden_layers=options.layers, max_position_embeddings=2**18, vocab_size=32000)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 32000, (1, options.tokens), device=options.device)
    cuda = options.device != "cpu"
    for spec in ("snapkv", "full", "snapkv", "h2o"):  # the first warms up
        cache = kvkeep.Cache(model, spec, 2048)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if cuda else 0
        start = time.perf_counter()
        with torch.inference_mode():
            model(ids, past_key_values=cache, logits_to_keep=1)
            if cuda:
                torch.cuda.synchronize()
        spent = time.perf_counter() - start
        peak = (torch.cuda.max_memory_allocated() - held) / 1e9 if cuda else 0
        kept = cache.report()
        print(f"{spec}: {spent:.2f} s, peak {peak:.2f} GB above the weights, holds {kept.bytes / 1e9:.3f} GB "
              f"of {kept.full_bytes / 1e9:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
