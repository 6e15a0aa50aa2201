"""A small attentive model, and a stock model whose attention is masked to what a cache kept: what eviction must equal.

Tests marked `trap(n)` show that a known mistake of this field is not made here; n is its number in the project's list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from conftest import EVICTING, copied
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import kvkeep
from kvkeep.compress.attention import attention
from kvkeep.compress.parse import parse
from kvkeep.errors import BadParameter

VOCAB = 128
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.15,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


@copied
def build(kind=LlamaForCausalLM, config=LlamaConfig, impl: str = "sdpa", seed: int = 0, **changes):
    """A small random model, attentive enough that dropping tokens shows in its logits."""
    torch.manual_seed(seed)
    return kind(config(**{**SHAPE, **changes}, attn_implementation=impl)).eval()


def tokens(n: int, seed: int = 1, rows: int = 1) -> Tensor:
    return torch.randint(1, VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids: Tensor, cache=None, **more) -> Tensor:
    return model(ids, past_key_values=cache, **more).logits


def prefilled(model, method: str = "snapkv", budget: int | float = 24, ids: Tensor | None = None, **parameters):
    cache = kvkeep.Cache(model, method, budget=budget, **parameters)
    logits(model, tokens(90) if ids is None else ids, cache)
    return cache


def kept(cache) -> list:
    return [cache.kept(layer) for layer in cache.compressed_layers]


def legal(name: str) -> bool:
    try:
        parse(name)
    except BadParameter:
        return False
    return True


EVERY = [name + cross for name in EVICTING for cross in ("", "+adakv", "+pyramid") if legal(name + cross)]
HARD = ["snapkv", "snapkv+adakv", "snapkv+pyramid", "intentkv+adakv+pyramid"]
BACKENDS = ["sdpa", "eager"]
# methods know nothing of the implementation: all of them on either, the hard ones on both
PAIRED = [(method, BACKENDS[number % 2]) for number, method in enumerate(EVERY)]
PAIRED += [(method, impl) for method in HARD[:3] for impl in BACKENDS if (method, impl) not in PAIRED]


def _reference_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling, **_):
    allowed = module.plan.repeat_interleave(query.shape[1] // key.shape[1], 0)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("masked_reference", _reference_attention)


AttentionMaskInterface.register("masked_reference", lambda *args, **kwargs: None)


@torch.no_grad()
def reference(model, ids: Tensor, stages: Sequence[tuple[int, list]]) -> Tensor:
    """Logits of a stock model whose queries from `end` on see, of what came before it, only what was kept.

    stages: (end, kept) in order, kept [layer][KV head] -> positions before end.
    """
    shape = {name: getattr(model.config, name) for name in SHAPE}
    config = type(model.config)(**shape, attn_implementation="masked_reference")
    stock = type(model)(config).eval().to(model.dtype)
    stock.load_state_dict(model.state_dict())
    n = ids.shape[1]
    for index, layer in enumerate(stock.model.layers):
        plan = torch.ones(n, n, dtype=torch.bool).tril().repeat(config.num_key_value_heads, 1, 1)
        for end, what in stages:
            for head, positions in enumerate(what[index]):
                plan[head, end:, :end] = False
                plan[head, end:, positions] = True
        layer.self_attn.plan = plan & torch.ones(n, n, dtype=torch.bool).tril()
    return stock(ids, use_cache=False).logits


def row(cache, which: int = 0) -> list:
    """What every layer kept of one row: [layer][KV head] -> positions."""
    return [layer[which] for layer in kept(cache)]


def random_qkv(n: int = 120, heads: int = 6, kv_heads: int = 2, dim: int = 8, seed: int = 0, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(h, n, dim, generator=make).mul(1.5).to(dtype) for h in (heads, kv_heads, kv_heads)]


@dataclass(frozen=True)
class Spy:
    """Looks at what a scorer is shown, and lets the newest tokens win."""

    seen: list
    window: int = 8

    def __call__(self, seen, budget: int) -> Tensor:
        self.seen.append((seen.layer, seen.tokens, attention(seen, self.window)))
        return seen.token_positions.float()


def spied(window: int = 8) -> tuple[kvkeep.Method, list]:
    notes: list = []
    return kvkeep.Method("spy", Spy(notes, window), observation_window=window), notes


LENGTHS = (45, 30, 9)


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask."""
    longest = max(len(r) for r in rows)
    ids = torch.stack([torch.cat([torch.zeros(longest - len(r), dtype=torch.long), r]) for r in rows])
    mask = torch.stack([torch.cat([torch.zeros(longest - len(r)), torch.ones(len(r))]) for r in rows]).long()
    return ids, mask


def forward_rows(model, cache, turn: Sequence[Tensor], past: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """One left-padded forward pass, positions as generate() makes them. -> real logits per row, the mask so far"""
    ids, mask = padded(turn)
    whole = mask if past is None else torch.cat([past, mask], 1)
    positions = (whole.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    out = logits(model, ids, cache, attention_mask=whole, position_ids=positions)
    return [o[m.bool()] for o, m in zip(out, mask, strict=True)], whole


def fits(method: str, budget: int) -> bool:
    try:
        parse(method).check(budget)
    except BadParameter:
        return False
    return True
