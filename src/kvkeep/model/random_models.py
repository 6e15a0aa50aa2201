"""Models of a given shape with random weights, to measure time and memory without a download."""

from __future__ import annotations

from typing import Any

import torch

from kvkeep.registry import Registry

LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
SHAPES = Registry("shape", {
    "llama-8b": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama2-7b": {
        **LLAMA, "rope_theta": 10000.0, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    },
    "llama-1b": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 256, "max_position_embeddings": 131072, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
})  # fmt: skip


def random_model(name: str, device: Any = None, dtype: Any = torch.float32) -> Any:
    """A Llama of this shape, its weights initialized on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[name])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device or "cpu").eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else torch.nn.init.ones_(weight)
    rotary = type(model.model.rotary_emb)(config=config).to(model.device)
    model.model.rotary_emb = rotary  # the frequencies of one made on the meta device have no values
    return model
