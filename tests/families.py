"""Tiny random models of many families, with nothing left at a value that would hide a mistake.

Norm weights, biases, sinks, scales and soft caps all differ from their defaults: skipping one would show.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = 12  # of sliding layers: well below any prompt in these tests


@dataclass(frozen=True)
class Family:
    """One architecture: `<kind>Config` and `<kind>ForCausalLM` of transformers, and what sets it apart."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    full: tuple[int, ...] = (0, 1)  # its full-attention layers
    kinds: tuple[str, ...] = ("sdpa", "eager")  # attention implementations that compute what the family means
    config: str = ""


SLIDING_FIRST = ["sliding_attention", "full_attention", "full_attention"]
FULL_FIRST = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES = {
    "llama": Family("Llama", {"attention_bias": True}),
    "mistral_sliding": Family("Mistral", {"sliding_window": WINDOW}, full=()),
    "mistral_full": Family("Mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", {"head_dim": 16}),
    "qwen3_moe": Family(
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
        },
    ),
    "gemma2": Family(
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 5.0,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_FIRST,
        },
        full=(1, 2),
        kinds=("eager",),  # stock sdpa leaves soft-capping out
    ),
    "gemma3_text": Family(
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 7,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_FIRST,
        },
        full=(1, 2),
        config="Gemma3TextConfig",
    ),
    "phi3": Family("Phi3", {"sliding_window": None}),
    "granite": Family(
        "Granite",
        {"attention_multiplier": 0.19, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    ),
    "olmo2": Family("Olmo2"),
    "cohere": Family("Cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "smollm3": Family("SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "gpt_oss": Family(
        "GptOss",
        {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": WINDOW, "layer_types": FULL_FIRST, **EXPERTS},
        full=(0, 2),
        kinds=("eager",),  # the only one transformers has for sinks on a CPU
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "partial_rotary_factor": 0.25,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
        },
        full=(1, 2),
    ),
}
CASES = [(name, kind) for name, family in FAMILIES.items() for kind in family.kinds]


@cache
def _original(name: str) -> PreTrainedModel:
    family = FAMILIES[name]
    config = getattr(transformers, family.config or f"{family.kind}Config")(**{**SIZES, **family.settings})
    return randomised(getattr(transformers, f"{family.kind}ForCausalLM")(config))


def build(name: str, kind: str = "eager") -> PreTrainedModel:
    """A fresh copy of a family's model, always with the same weights."""
    model = copy.deepcopy(_original(name))
    model.set_attn_implementation(kind)
    return model


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every parameter a value of its own, lively enough that attention is far from even."""
    random = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=random)
        if "norm" in name:
            weight.data.add_(0.3 * noise)
        elif weight.ndim == 1 or name.endswith("bias"):
            weight.data.copy_(0.5 * noise)  # biases, sinks, decay rates
        else:
            weight.data.copy_(0.2 * noise)
    return model.eval().requires_grad_(False)


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random token ids, none of them padding. [rows, tokens]"""
    return torch.randint(1, SIZES["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(seed))
