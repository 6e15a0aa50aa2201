"""The correctness traps of this field, one by one, each with a test that the wrong behaviour fails.

Numbers are those of the list the project keeps of its peers' mistakes. 17 (H2O) is in test_methods.py, 24 (re-rotation)
in test_place.py, 21 (benchmark protocols) in test_eval.py.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import EVICTING
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, max_pool1d
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    TextStreamer,
    pipeline,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import kvkeep
from kvkeep.compress.attention import attention
from kvkeep.compress.parse import parse
from kvkeep.errors import BadCacheFile, BadParameter, CacheMisuse, KvkeepError, UnsupportedModel
from kvkeep.model.hf_attention import AttentionCall, enable

VOCAB = 128
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.15,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def build(kind=LlamaForCausalLM, config=LlamaConfig, impl: str = "sdpa", seed: int = 0, **changes):
    """A small random model, attentive enough that dropping tokens shows in its logits."""
    torch.manual_seed(seed)
    return kind(config(**{**SHAPE, **changes}, attn_implementation=impl)).eval()


@pytest.fixture
def model():
    return build()


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


# --- the reference: a stock model whose attention is restricted, per layer and head, by a mask -----------------------


def _reference_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling, **_):
    allowed = module.plan.repeat_interleave(query.shape[1] // key.shape[1], 0)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("traps_reference", _reference_attention)
AttentionMaskInterface.register("traps_reference", lambda *args, **kwargs: None)


@torch.no_grad()
def reference(model, ids: Tensor, stages: Sequence[tuple[int, list]]) -> Tensor:
    """Logits of a stock model whose queries from `end` on see, of what came before it, only what was kept.

    stages: (end, kept) in order, kept [layer][key head] -> positions before end.
    """
    shape = {name: getattr(model.config, name) for name in SHAPE}
    config = type(model.config)(**shape, attn_implementation="traps_reference")
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
    """What every layer kept of one row: [layer][key head] -> positions."""
    return [layer[which] for layer in kept(cache)]


@pytest.mark.core
@pytest.mark.trap(1)
@pytest.mark.trap(3)
@pytest.mark.trap(5)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", HARD)
@pytest.mark.parametrize("follow", [1, 12])
def test_evicted_cache_equals_masked_attention(method, impl, follow):
    """A follow-up over the evicted cache gives the logits of a stock model that may look only at what was kept."""
    model, ids = build(impl=impl), tokens(90 + follow)
    cache = prefilled(model, method, 24, ids[:, :90])
    what = row(cache)
    assert sum(len(head) for layer in what for head in layer) == 24 * 6
    got = logits(model, ids[:, 90:], cache)
    want = reference(model, ids, [(90, what)])[:, 90:]
    assert (got - want).abs().max() < 1e-4
    assert (got - logits(model, ids)[:, 90:]).abs().max() > 1e-2, "the eviction is invisible: the test shows nothing"


@pytest.mark.core
@pytest.mark.trap(1)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", HARD)
def test_turns_equal_masked_attention(method, impl):
    """Prompt, three decoded tokens, a second turn, one more token: each sees what was kept by then."""
    model, ids = build(impl=impl), tokens(60 + 3 + 30 + 1)
    cache = prefilled(model, method, 20, ids[:, :60])
    stages = [(60, row(cache))]
    got = [logits(model, ids[:, i : i + 1], cache) for i in range(60, 63)]
    got.append(logits(model, ids[:, 63:93], cache))
    stages.append((93, row(cache)))
    assert sum(len(head) for layer in stages[1][1] for head in layer) <= 20 * 6
    got.append(logits(model, ids[:, 93:], cache))
    assert (torch.cat(got, 1) - reference(model, ids, stages)[:, 60:]).abs().max() < 1e-4


# --- 1 to 6: positions, masks, versions -----------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.trap(1)
@pytest.mark.parametrize("method", HARD)
def test_generate_from_full_ids_takes_the_right_suffix(method, model):
    """generate() over prompt and question, on a cache that saw the prompt, feeds the question at its true place."""
    ids = tokens(101)
    cache = prefilled(model, method, 24, ids[:, :90])
    assert cache.get_seq_length() == 90
    by_hand, out = cache.fork(), ids
    got = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    new = ids[:, 90:]
    for _ in range(5):
        where = torch.arange(out.shape[1] - new.shape[1], out.shape[1])[None]
        new = logits(model, new, by_hand, position_ids=where)[:, -1:].argmax(-1)
        out = torch.cat([out, new], 1)
    assert got.tolist() == out.tolist()
    assert cache.get_seq_length() == 105


@pytest.mark.core
@pytest.mark.trap(2)
def test_cache_layers_answer_old_and_new_calls(model):
    """Mask sizes from a count or from positions; every way transformers has asked for a length."""
    cache = prefilled(model)
    layer = cache.layers[0]
    assert tuple(layer.get_mask_sizes(7)) == tuple(layer.get_mask_sizes(torch.arange(90, 97))) == (97, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    assert cache.get_seq_length() == cache.get_seq_length(1) == 90
    assert len(cache) == 3 and cache.is_initialized and not cache.is_compileable
    if hasattr(cache, "get_query_offset"):
        assert cache.get_query_offset() == 90
    keys = torch.zeros(1, 2, 1, 16)
    assert [t.shape for t in layer.update(keys, keys, {"cache_position": None})] == [keys.shape] * 2


@pytest.mark.core
@pytest.mark.trap(3)
@pytest.mark.parametrize("impl", BACKENDS)
def test_layers_of_different_length_take_a_question(impl):
    """Layer-wise budgets really differ, and a 12-token question works on them; one mask would not fit them all."""
    model = build(impl=impl)
    cache = prefilled(model, "snapkv+pyramid", 24)
    lengths = [len(layer[0][0]) for layer in kept(cache)]
    assert len(set(lengths)) == 3 and sum(lengths) == 24 * 3 and lengths == sorted(lengths, reverse=True)
    assert logits(model, tokens(12, 5), cache).isfinite().all()


@pytest.mark.core
@pytest.mark.trap(4)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("follow", [1, 12])
def test_mask_of_ones_after_eviction_changes_nothing(impl, follow):
    """A 2-D mask over all tokens seen is not sliced by the compressed length."""
    model, question = build(impl=impl), tokens(follow, 3)
    cache = prefilled(model, "snapkv+adakv")
    twin = cache.fork()
    with_mask = logits(model, question, cache, attention_mask=torch.ones(1, 90 + follow, dtype=torch.long))
    assert torch.equal(with_mask, logits(model, question, twin))


@pytest.mark.core
@pytest.mark.trap(4)
def test_mask_of_the_compressed_length_is_refused(model):
    """A mask that counts kept tokens instead of seen ones is an error, not a guess."""
    cache = prefilled(model)
    with pytest.raises(CacheMisuse, match="91 columns"):
        logits(model, tokens(1), cache, attention_mask=torch.tensor([[0] + [1] * 24]))


@pytest.mark.core
@pytest.mark.trap(5)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", ["full", *HARD])
def test_many_tokens_at_once_equal_one_by_one(method, impl):
    """Twelve tokens over a past see the past and their own predecessors: a top-left causal mask would hide the past."""
    model, question = build(impl=impl), tokens(12, 3)
    cache = prefilled(model, method)
    twin = cache.fork()
    at_once = logits(model, question, cache)
    one_by_one = torch.cat([logits(model, question[:, i : i + 1], twin) for i in range(12)], 1)
    assert (at_once - one_by_one).abs().max() < 1e-4


@pytest.mark.core
@pytest.mark.trap(6)
@pytest.mark.parametrize("impl", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_other_attention_is_refused_by_name(impl, model):
    """Attention we cannot stand in for is named, and the model stays as it was."""
    model.config._attn_implementation_internal = impl
    for attempt in (enable, lambda m: kvkeep.Cache(m, "snapkv", budget=24)):
        with pytest.raises(UnsupportedModel, match=impl.replace("|", r"\|")):
            attempt(model)
    assert model.config._attn_implementation == impl


# --- 7 to 10: how votes are counted ---------------------------------------------------------------------------------


def random_qkv(n: int = 120, heads: int = 6, kv_heads: int = 2, dim: int = 8, seed: int = 0, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(h, n, dim, generator=make).mul(1.5).to(dtype) for h in (heads, kv_heads, kv_heads)]


def window_attention(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """The plain way: [heads, window, n]"""
    n = keys.shape[1]
    keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    scores = queries[:, -window:] @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5
    causal = torch.ones(n, n, dtype=torch.bool).tril()[-window:]
    return scores.masked_fill(~causal, -torch.inf).float().softmax(-1)


def top(scores: Tensor, budget: int, window: int) -> list[list[int]]:
    n = scores.shape[1] + window
    return [sorted([*s.topk(budget - window).indices.tolist(), *range(n - window, n)]) for s in scores]


@pytest.mark.core
@pytest.mark.trap(7)
def test_groups_are_averaged_before_max_pooling():
    """Votes of heads that share a key head are averaged, then pooled; with max pooling the order matters."""
    q, k, v = random_qkv()
    votes = window_attention(q, k, 8).sum(1)[:, :-8]
    first = max_pool1d(votes.view(2, 3, -1).mean(1), 7, 1, 3)
    after = max_pool1d(votes, 7, 1, 3).view(2, 3, -1).mean(1)
    got = kvkeep.select("snapkv", q, k, v, 40, window=8, pool=7, pooling="max").tolist()
    cut = [row.sort(descending=True).values[31] for row in first]  # max pooling ties: compare by score reached
    for head in range(2):
        assert min(first[head, i] for i in got[head][:-8]) >= cut[head]
    assert got != top(after, 40, 8)


@pytest.mark.core
@pytest.mark.trap(7)
def test_storage_holds_key_heads_not_query_heads(model):
    """The cache stores Hk heads, so memory shrinks by the stated ratio."""
    cache = prefilled(model)
    assert cache.report().kv_heads == 2 and all(len(layer[0]) == 2 for layer in kept(cache))
    assert cache.nbytes == 24 * 3 * 2 * (16 + 16) * 4


@pytest.mark.core
@pytest.mark.trap(8)
def test_votes_are_float32_whatever_the_model():
    """bfloat16 tensors vote as their float32 values do; a cast of the attention before the sum makes ties."""
    differ = 0
    for seed in range(6):
        q, k, v = random_qkv(n=600, seed=seed, dtype=torch.bfloat16)
        exact = window_attention(q.float(), k.float(), 32).view(2, 3, 32, -1).mean(1).sum(1)[:, :-32]
        cast = window_attention(q, k, 32).to(torch.bfloat16).view(2, 3, 32, -1).mean(1).sum(1)[:, :-32]
        got = kvkeep.select("snapkv", q, k, v, 200, window=32, pool=1).tolist()
        assert got == top(exact, 200, 32)
        differ += got != top(cast, 200, 32)
    assert differ, "casting would not have shown"


@pytest.mark.core
@pytest.mark.trap(9)
def test_pooling_divides_by_real_neighbours_and_defaults_are_stated():
    """Border tokens are not lowered by padding zeros; the defaults are window 64, average pool 5."""
    assert dict(parse("snapkv").parameters) == {"window": 64, "pool": 5, "pooling": "avg"}
    differ = 0
    for seed in range(8):
        q, k, v = random_qkv(n=60, seed=seed)
        votes = window_attention(q, k, 8).view(2, 3, 8, -1).mean(1).sum(1)[:, :-8]
        got = kvkeep.select("snapkv", q, k, v, 24, window=8).tolist()
        assert got == top(avg_pool1d(votes, 5, 1, 2, count_include_pad=False), 24, 8)
        differ += got != top(avg_pool1d(votes, 5, 1, 2), 24, 8)
    assert differ, "counting the padding would not have shown"


@pytest.mark.core
@pytest.mark.trap(10)
@pytest.mark.parametrize("budget", [9, 20, 64, 100])
def test_window_is_kept_and_counts_in_the_budget(budget):
    """The observation window is part of the budget, at most half of it, and never competes."""
    q, k, v = random_qkv(n=200)
    window = min(64, budget // 2)
    for head in kvkeep.select("snapkv", q, k, v, budget).tolist():
        assert len(head) == budget and head[-window:] == list(range(200 - window, 200))
    layers = [kvkeep.select("snapkv+pyramid", q, k, v, budget, layer=i, layers=5).lengths for i in range(5)]
    assert sum(sum(lengths) for lengths in layers) == budget * 5 * 2


@pytest.mark.core
@pytest.mark.trap(10)
def test_window_queries_are_causal_among_themselves():
    """A query of the window does not vote for tokens after it."""
    q, k, v = random_qkv(n=40)
    changed = k.clone()
    changed[:, -1] *= 30  # only the last query may see the last key
    votes = window_attention(q, changed, 8).view(2, 3, 8, -1).mean(1).sum(1)[:, :-8]
    got = kvkeep.select("snapkv", q, changed, v, 20, window=8, pool=1).tolist()
    assert got == top(votes, 20, 8)


# --- 11, 12: what attention really computed, and which layers we own ------------------------------------------------


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


FAMILIES = {
    "qwen3 (q_norm)": (Qwen3ForCausalLM, Qwen3Config, {}),
    "granite (own scale)": (GraniteForCausalLM, GraniteConfig, {"attention_multiplier": 0.7}),
    "gemma2 (soft-capping, own scale)": (
        Gemma2ForCausalLM, Gemma2Config,
        {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5, "layer_types": ["full_attention"] * 3},
    ),
    "gpt-oss (sink logits)": (
        GptOssForCausalLM, GptOssConfig,
        {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 3},
    ),
    "smollm3 (layers without RoPE)": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.trap(11)
@pytest.mark.parametrize("family", FAMILIES)
def test_scorers_see_the_models_own_attention(family):
    """The attention a scorer sees is the model's eager attention, norms, scales, caps and sinks included."""
    kind, config, changes = FAMILIES[family]
    model = build(kind, config, "eager", **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "sinks" in name:
                weight.add_(torch.randn_like(weight) * 0.5)
        ids = tokens(50)
        want = model(ids, output_attentions=True).attentions
    method, notes = spied()
    logits(model, ids, kvkeep.Cache(model, method, budget=20))
    assert [layer for layer, *_ in notes] == [0, 1, 2]
    for (_, _, got), theirs in zip(notes, want, strict=True):
        assert (got.flatten(0, 1) - theirs[0, :, -8:]).abs().max() < 1e-5


@pytest.mark.core
@pytest.mark.trap(12)
def test_sliding_layers_are_left_alone():
    """Sliding-window layers keep their stock cache, are not counted, and cannot be asked what they kept."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = build(Gemma2ForCausalLM, Gemma2Config, "eager", sliding_window=16, layer_types=types)
    ids = tokens(70)
    plain = DynamicCache(config=model.config)
    want = torch.cat([logits(model, ids[:, :60], plain), logits(model, ids[:, 60:], plain)], 1)
    roomy = kvkeep.Cache(model, "snapkv", budget=100)
    got = torch.cat([logits(model, ids[:, :60], roomy), logits(model, ids[:, 60:], roomy)], 1)
    assert torch.equal(got[:, :60], want[:, :60]) and (got - want).abs().max() < 1e-5
    cache = prefilled(model, "snapkv+adakv", 20, ids)
    assert cache.compressed_layers == [1] and cache.report().layers == 1
    assert type(cache.layers[0]) is type(plain.layers[0])
    assert cache.nbytes == 20 * 2 * (16 + 16) * 4
    with pytest.raises(CacheMisuse, match="layer 0"):
        cache.kept(0)
    assert model.generate(ids, past_key_values=cache.fork(), max_new_tokens=3, do_sample=False).shape == (1, 73)


@pytest.mark.core
@pytest.mark.trap(12)
def test_linear_layers_are_left_alone():
    """A hybrid's linear-attention layers keep their own state and are not counted."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    model = build(
        Qwen3NextForCausalLM, Qwen3NextConfig, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    ids = tokens(40)
    stock = model.generate(ids, max_new_tokens=4, do_sample=False)
    roomy = kvkeep.Cache(model, "snapkv", budget=99)
    assert model.generate(ids, past_key_values=roomy, max_new_tokens=4, do_sample=False).equal(stock)
    cache = kvkeep.Cache(model, "snapkv", budget=16)
    logits(model, ids, cache)
    assert cache.compressed_layers == [1] and [len(head) for head in cache.kept(1)[0]] == [16, 16]
    assert logits(model, tokens(1), cache).isfinite().all()


@pytest.mark.core
@pytest.mark.trap(12)
def test_latent_attention_is_refused_by_name():
    """MLA stores no keys to choose from."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = build(
        DeepseekV3ForCausalLM, DeepseekV3Config, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=16, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="DeepseekV3ForCausalLM"):
        kvkeep.Cache(model, "snapkv", budget=10)


# --- 13 to 18: what is protected, padding, protocols, ratios ---------------------------------------------------------


@pytest.mark.core
@pytest.mark.trap(13)
def test_each_method_says_whether_it_protects_the_first_tokens(model):
    """StreamingLLM always keeps its sinks; IntentKV when asked; SnapKV judges them like any other token."""
    streaming, asked = prefilled(model, "streamingllm", 10), prefilled(model, "intentkv", 10, sinks=3)
    assert all(head[:4] == [0, 1, 2, 3] for layer in row(streaming) for head in layer)
    assert all(head[:3] == [0, 1, 2] for layer in row(asked) for head in layer)
    q, k, v = random_qkv()
    k[:, :4] = -q[:3, -1:].mean(0) * 10  # nobody looks at the first tokens
    q[:] = q[:3, -1:].mean(0)
    assert all(head[0] > 3 for head in kvkeep.select("snapkv", q, k, v, 20).tolist())


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


def conversation(count: int) -> list[list[Tensor]]:
    """Turns of `count` rows: a prompt, a decoded token, a second prompt of other lengths, a token."""
    lengths = [LENGTHS, (1, 1, 1), (5, 20, 12), (1, 1, 1)]
    return [[tokens(n, 100 * t + r)[0] for r, n in enumerate(turn[:count])] for t, turn in enumerate(lengths)]


@pytest.mark.core
@pytest.mark.trap(14)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", EVERY)
def test_left_padded_rows_equal_solo_runs(method, impl):
    """Every row of a padded batch keeps the tokens and gives the logits that it does alone, turn after turn."""
    model, turns = build(impl=impl), conversation(3)
    together, mask = kvkeep.Cache(model, method, budget=14), None
    alone, past = [kvkeep.Cache(model, method, budget=14) for _ in range(3)], [None] * 3
    for turn in turns:
        got, mask = forward_rows(model, together, turn, mask)
        for r, cache in enumerate(alone):
            (want,), past[r] = forward_rows(model, cache, [turn[r]], past[r])
            assert row(together, r) == row(cache)
            assert (got[r] - want).abs().max() < 1e-4


@pytest.mark.core
@pytest.mark.trap(14)
@pytest.mark.parametrize("method", ["snapkv", "intentkv+adakv", "snapkv+adakv+pyramid"])
def test_left_padded_generate_equals_solo_generate(method, model):
    """The same through generate(): same new tokens for each row as alone, on a first and a second turn."""
    rows = [tokens(n, n)[0] for n in LENGTHS]
    ids, mask = padded(rows)
    options = dict(max_new_tokens=4, do_sample=False)
    cache = kvkeep.Cache(model, method, budget=14)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    for r, solo in enumerate(rows):
        alone = model.generate(solo[None], past_key_values=kvkeep.Cache(model, method, budget=14), **options)
        assert out[r, -4:].tolist() == alone[0, -4:].tolist()
    question, shown = padded([tokens(n, 7 * n)[0] for n in (3, 11, 6)])
    out = torch.cat([out, question], 1)
    mask = torch.cat([mask, torch.ones(3, 4, dtype=torch.long), shown], 1)
    again = model.generate(out, attention_mask=mask, past_key_values=cache, **options)
    assert again.shape[1] == out.shape[1] + 4
    assert cache.report().tokens_seen == [n + 4 + q + 3 for n, q in zip(LENGTHS, (3, 11, 6), strict=True)]


@pytest.mark.core
@pytest.mark.trap(14)
def test_fraction_is_taken_from_the_real_length(model):
    """A row of 20 real tokens in a batch of 40 columns keeps half of 20."""
    cache = kvkeep.Cache(model, "snapkv", budget=0.5)
    forward_rows(model, cache, [tokens(40)[0], tokens(20)[0]], None)
    assert [[len(head) for head in r] for r in cache.kept(0)] == [[20, 20], [10, 10]]


@pytest.mark.core
@pytest.mark.trap(15)
def test_first_token_sees_everything_unless_the_question_comes_later(model):
    """A question inside the prompt sees all of it, bit-equal to the stock model; one after it sees what is left."""
    ids = tokens(90)
    want = logits(model, ids)
    whole = kvkeep.Cache(model, "snapkv", budget=8)
    assert torch.equal(logits(model, ids, whole), want)
    later = prefilled(model, "snapkv", 8, ids[:, :80])
    what = row(later)
    assert all(position < 80 for layer in what for head in layer for position in head)
    got = logits(model, ids[:, 80:], later)
    assert (got - want[:, 80:]).abs().max() > 1e-2
    other = prefilled(model, "snapkv", 8, ids[:, :80])
    assert row(other) == what, "the context's selection may not depend on the question"


@pytest.mark.core
@pytest.mark.trap(16)
def test_fractions_are_floored_without_float_error():
    """budget=0.1 of 1000 tokens is 100, not 99: the fraction that was written, times n, rounded down."""
    method = parse("snapkv")
    for percent in range(1, 101):
        for n in (1, 7, 10, 29, 100, 1000, 3000, 131072):
            assert method.tokens(percent / 100, n) == max(1, int(Fraction(percent, 100) * n)), (percent, n)


@pytest.mark.core
@pytest.mark.trap(16)
@pytest.mark.parametrize("budget", [5, 23, 64, 0.3])
@pytest.mark.parametrize("method", [m for m in EVERY if not m.startswith("full")])
def test_budget_is_spent_exactly(method, budget, model):
    """Blocks, heads and layers are rounded, the total is not; what is reported is what is held."""
    if parse(method).guard.size(5) > 5:
        budget = max(budget, 11) if isinstance(budget, int) else budget
    cache = prefilled(model, method, budget)
    want = (budget if isinstance(budget, int) else 27) * 6
    report = cache.report()
    assert sum(n for layer in report.tokens for r in layer for n in r) == want
    assert cache.nbytes == report.bytes == want * (16 + 16) * 4
    assert report.full_bytes == 90 * 6 * (16 + 16) * 4


@pytest.mark.core
@pytest.mark.trap(18)
def test_streamingllm_keeps_few_first_and_many_last(model):
    """Four sinks and the rest recent, after a prompt in one piece, in chunks, and after a second turn."""
    whole = prefilled(model, "streamingllm", 20)
    chunked = kvkeep.Cache(model, "streamingllm", budget=20)
    for piece in tokens(90).split(17, 1):
        logits(model, piece, chunked)
    for cache in (whole, chunked):
        assert all(head == [0, 1, 2, 3, *range(74, 90)] for layer in row(cache) for head in layer)
    logits(model, tokens(30, 2), whole)
    assert all(head == [0, 1, 2, 3, *range(104, 120)] for layer in row(whole) for head in layer)
    q, k, v = random_qkv()
    assert kvkeep.select("streamingllm", q, k, v, 10).tolist() == [[0, 1, 2, 3, *range(114, 120)]] * 2


# --- 19: state belongs to the cache ---------------------------------------------------------------------------------


def steps(model, cache, seed: int):
    """A conversation in pieces, yielding the logits of each."""
    for n in (60, 1, 1, 20, 1, 33, 1):
        yield logits(model, tokens(n, seed + n), cache)


@pytest.mark.core
@pytest.mark.trap(19)
def test_second_and_third_call_compress_like_the_first(model):
    """New caches on the same model, and one cache after reset(), do what the first did."""
    first = prefilled(model, "snapkv+adakv")
    want, answer = kept(first), logits(model, tokens(3), first)
    for _ in range(2):
        cache = prefilled(model, "snapkv+adakv")
        assert kept(cache) == want and torch.equal(logits(model, tokens(3), cache), answer)
    first.reset()
    logits(model, tokens(90), first)
    assert kept(first) == want and torch.equal(logits(model, tokens(3), first), answer)


@pytest.mark.core
@pytest.mark.trap(19)
def test_interleaved_conversations_equal_solo_runs(model):
    """Conversations with different methods take turns on one model; each is bit-equal to itself alone."""
    solo = [list(steps(model, kvkeep.Cache(model, name, budget=16), i)) for i, name in enumerate(EVERY)]
    caches = [kvkeep.Cache(model, name, budget=16) for name in EVERY]
    mixed = zip(*(steps(model, cache, i) for i, cache in enumerate(caches)), strict=True)
    for number, round_ in enumerate(mixed):
        for mine, want in zip(round_, solo, strict=True):
            assert torch.equal(mine, want[number])


@pytest.mark.core
@pytest.mark.trap(19)
def test_two_threads_equal_solo_runs(model):
    """Two conversations on one model in two threads do not meet."""
    names = ["snapkv+adakv", "intentkv+pyramid"]
    solo = [list(steps(model, kvkeep.Cache(model, name, budget=16), i)) for i, name in enumerate(names)]
    fresh, got, start = build(), [[], []], threading.Barrier(2)

    def talk(i: int) -> None:
        start.wait()
        for _ in range(5):
            got[i] = list(steps(fresh, kvkeep.Cache(fresh, names[i], budget=16), i))

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for mine, want in zip(got, solo, strict=True):
        assert len(mine) == len(want) and all(map(torch.equal, mine, want))


@pytest.mark.core
@pytest.mark.trap(19)
@pytest.mark.parametrize("impl", BACKENDS)
def test_stock_use_is_bit_equal_before_between_and_after(impl):
    """Without a cache of ours the model is the stock one: plain, padded, with its own caches, in generate."""
    model, ids = build(impl=impl), tokens(40, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0

    def stock() -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        torch.manual_seed(3)
        with torch.no_grad():
            turns = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 30), (30, 31), (31, 40))]
        return [
            *turns, logits(model, ids), logits(model, ids, attention_mask=mask), logits(model, ids, use_cache=False),
            logits(model, ids, attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()),
            model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True),
            model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation="static"),
        ]  # fmt: skip

    before = stock()
    cache = kvkeep.Cache(model, "snapkv+adakv", budget=12)
    assert all(map(torch.equal, stock(), before))
    logits(model, ids, cache, attention_mask=mask)
    assert all(map(torch.equal, stock(), before))
    logits(model, tokens(1, rows=2), cache)
    del cache
    assert all(map(torch.equal, stock(), before))


# --- 20, 27: many continuations of one context ----------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.trap(20)
@pytest.mark.parametrize("method", HARD)
def test_log_likelihood_of_continuations_feels_the_eviction(method, model):
    """Continuations scored from forks equal masked attention, not the full model, and leave each other alone."""
    context = tokens(80)
    cache = prefilled(model, method, 20, context)
    before = kept(cache)
    last = logits(model, context)[:, -1:]
    for seed in (5, 6, 7):
        choice = tokens(6, seed)
        whole = torch.cat([context, choice], 1)

        def likelihood(scores: Tensor, choice: Tensor = choice) -> float:
            return torch.cat([last, scores[:, :-1]], 1).log_softmax(-1).gather(2, choice[..., None]).sum().item()

        got = likelihood(logits(model, choice, cache.fork()))
        want = likelihood(reference(model, whole, [(80, row(cache))])[:, 80:])
        full = likelihood(logits(model, whole)[:, 80:])
        assert abs(got - want) < 1e-3 and abs(got - full) > 1e-2
    assert kept(cache) == before


@pytest.mark.core
@pytest.mark.trap(27)
@pytest.mark.parametrize("method", HARD)
def test_fork_instead_of_crop(method, model):
    """A compressed cache refuses crop() and names fork(); answers on forks leave the original bit-equal."""
    cache = prefilled(model, method)
    for arguments in ((80,), (-3,)):
        with pytest.raises(CacheMisuse, match="fork"):
            cache.crop(*arguments)
    want, nbytes = kept(cache), cache.nbytes
    answers = []
    for _ in range(2):
        fork = cache.fork()
        answers.append([logits(model, tokens(12, 8), fork), logits(model, tokens(1, 9), fork)])
        assert kept(cache) == want and cache.nbytes == nbytes and cache.get_seq_length() == 90
    assert all(map(torch.equal, *answers))
    assert torch.equal(logits(model, tokens(12, 8), cache), answers[0][0])


# --- 22, 23, 25, 26: order, host, devices, queries ------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.trap(22)
@pytest.mark.parametrize("method", EVERY)
def test_kept_tokens_stay_in_order(method, model):
    """topk does not sort; we do: in selections, in storage, after decoding and after a second turn."""
    q, k, v = random_qkv()
    for head in kvkeep.select(method, q, k, v, 30).tolist():
        assert head == sorted(set(head))
    cache = prefilled(model, method, 30)
    for more in (1, 1, 25):
        logits(model, tokens(more, more), cache)
        assert all(head == sorted(set(head)) for layer in row(cache) for head in layer)
    held = cache.backend.store[0].row(0)[1].keys
    assert held.shape[0] == len(cache.kept(0)[0][1])


class Syncs(TorchDispatchMode):
    """Counts the moments a device and its host wait for each other: a number read back, a list sent over."""

    aten = torch.ops.aten
    waiting = (aten._local_scalar_dense.default, aten.nonzero.default, aten.lift_fresh.default)
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.waiting
        return func(*args, **(kwargs or {}))


def waits(layers: int, method: str) -> tuple[int, int]:
    """Waits of a prefill, and of a decode step that finds room in the cache."""
    model = build(num_hidden_layers=layers)
    cache = kvkeep.Cache(model, method, budget=130)
    with Syncs() as prefill:
        logits(model, tokens(200), cache)
    logits(model, tokens(1), cache)
    with Syncs() as decode:
        logits(model, tokens(1), cache)
    return prefill.count, decode.count


@pytest.mark.trap(23)
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv"])
def test_decoding_does_not_wait_for_the_device_in_every_layer(method):
    """A decode step exchanges nothing with the device that grows with the number of layers."""
    assert waits(2, method)[1] == waits(6, method)[1]


@pytest.mark.trap(23)
def test_prefill_does_not_read_back_from_every_layer(monkeypatch):
    """With equal heads all sizes are known beforehand: no layer's selection needs an answer from the device."""
    monkeypatch.setattr(Syncs, "waiting", Syncs.waiting[:2])
    assert waits(2, "snapkv")[0] == waits(6, "snapkv")[0]


@pytest.mark.core
@pytest.mark.trap(25)
def test_positions_live_where_the_layers_keys_live(model):
    """Under a device map, a layer's index lies on that layer's device, not on the first one's."""
    cache = kvkeep.Cache(model, "full")
    nothing = {name: lambda *_: None for name in ("check", "check_nan", "raise_if_failed")}
    cache.attention_check = SimpleNamespace(**nothing)
    for index, device in enumerate(("cpu", "meta", "meta")):
        q, kv = torch.zeros(1, 4, 5, 16, device=device), torch.zeros(1, 2, 5, 16, device=device)
        cache.attend(index, AttentionCall(q, kv, kv, None, lambda q=q: (q.transpose(1, 2), None), 0.25, None, None))
    for store in cache.backend.store.values():
        assert store.flat.token_positions.device == store.flat.keys.device


@pytest.mark.core
@pytest.mark.trap(26)
@pytest.mark.parametrize("pieces", [(60,), (50, 10), (30, 27, 3), (56, 2, 2)])
def test_voting_queries_keep_their_own_rotation(pieces):
    """Queries remembered over the pieces of a prompt vote as the stock model's did, each at its own position."""
    model, ids, (method, notes) = build(impl="eager"), tokens(60), spied(window=8)
    with torch.no_grad():
        want = model(ids, output_attentions=True).attentions
    cache = kvkeep.Cache(model, method, budget=59)
    for piece in ids.split(pieces, 1):
        logits(model, piece, cache)
    for (_, seen, got), theirs in zip(notes[-3:], want, strict=True):
        assert seen == 60 and (got.flatten(0, 1) - theirs[0, :, -8:]).abs().max() < 1e-5


@pytest.mark.core
@pytest.mark.trap(26)
def test_voting_queries_of_a_padded_row_are_its_own():
    """In a left-padded batch the voters are each row's last real queries, over its real keys only."""
    model, (method, notes) = build(impl="eager"), spied(window=8)
    rows = [tokens(40, 1)[0], tokens(25, 2)[0]]
    forward_rows(model, kvkeep.Cache(model, method, budget=20), rows, None)
    for r, solo in enumerate(rows):
        with torch.no_grad():
            want = model(solo[None], output_attentions=True).attentions
        for (_, seen, got), theirs in zip(notes[r::2], want, strict=True):
            assert seen == len(solo) and (got.flatten(0, 1) - theirs[0, :, -8:]).abs().max() < 1e-5


# --- inside plain transformers --------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", EVERY)
def test_room_for_everything_changes_nothing(method, impl):
    """budget >= n: prefill bit-equal to the stock model, decoding within 1e-5, the same greedy tokens."""
    model, ids = build(impl=impl), tokens(50)
    stock, ours = DynamicCache(config=model.config), kvkeep.Cache(model, method, budget=200)
    assert torch.equal(logits(model, ids, ours), logits(model, ids, stock))
    for n in (1, 1, 9, 1):
        assert (logits(model, tokens(n, n), ours) - logits(model, tokens(n, n), stock)).abs().max() < 1e-5
    options, fresh = dict(max_new_tokens=8, do_sample=False), kvkeep.Cache(model, method, budget=200)
    assert model.generate(ids, past_key_values=fresh, **options).equal(model.generate(ids, **options))


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv", "intentkv+adakv+pyramid"])
def test_every_turn_ends_within_budget(method, model):
    """After each prompt, whatever its length, the cache is back at its budget."""
    cache = kvkeep.Cache(model, method, budget=18)
    for n in (70, 2, 40, 5):
        logits(model, tokens(n, n), cache)
        assert cache.report().kept_per_head <= 18
        logits(model, tokens(1), cache)


@pytest.mark.core
@pytest.mark.parametrize("method", ["streamingllm", "snapkv", "snapkv+adakv", "intentkv+pyramid"])
def test_chunked_prefill_is_bounded_and_exact_with_room(method, model):
    """prefill_chunk_size: the stock tokens where there is room; else at most budget + chunk, then the budget."""
    ids, options = tokens(120), dict(max_new_tokens=6, do_sample=False, prefill_chunk_size=16)
    roomy, want = kvkeep.Cache(model, method, budget=500), model.generate(ids, max_new_tokens=6, do_sample=False)
    assert model.generate(ids, past_key_values=roomy, **options).equal(want)
    notes: list = []
    recipe = parse(method)

    def watching(seen, budget: int) -> Tensor:
        notes.append(sum(seen.lengths) / len(seen.lengths))
        return recipe.scorer(seen, budget)

    cache = kvkeep.Cache(model, replace(recipe, scorer=watching), budget=20)
    model.generate(ids, past_key_values=cache, **options | {"max_new_tokens": 1})
    assert notes and (max(notes) <= 20 + 16 or "pyramid" in method)
    assert sum(n for layer in cache.report().tokens for n in layer[0]) == 20 * 6


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv", "intentkv+adakv+pyramid"])
def test_beam_search(method, model):
    """Three beams: the stock result where there is room, and rows that follow their beams where there is not."""
    ids, options = tokens(40), dict(max_new_tokens=6, num_beams=3, do_sample=False)
    roomy = kvkeep.Cache(model, method, budget=100)
    assert model.generate(ids, past_key_values=roomy, **options).equal(model.generate(ids, **options))
    tight = kvkeep.Cache(model, method, budget=12)
    out = model.generate(ids, past_key_values=tight, **options)
    assert out.shape == (1, 46) and len(tight.tracker.seen) == 3
    assert tight.kept(0)[0] == tight.kept(0)[2]


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "intentkv+adakv"])
def test_sampling_with_a_seed(method, model):
    """Seeded sampling gives the stock tokens where there is room; several sequences too."""
    ids, options = tokens(40), dict(max_new_tokens=8, do_sample=True, num_return_sequences=2, top_k=20)
    torch.manual_seed(4)
    want = model.generate(ids, **options)
    torch.manual_seed(4)
    assert model.generate(ids, past_key_values=kvkeep.Cache(model, method, budget=100), **options).equal(want)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", padding_side="left")


@pytest.mark.core
def test_pipeline_takes_a_cache(model, tokenizer):
    """pipeline("text-generation") with room equals the stock one; with a budget it evicts."""
    say = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    text = " ".join(f"w{i}" for i in tokens(60)[0].clamp_min(2).tolist())
    options = dict(max_new_tokens=6, do_sample=False, return_full_text=False)
    want = say(text, **options)
    assert say(text, past_key_values=kvkeep.Cache(model, "snapkv", budget=100), **options) == want
    cache = kvkeep.Cache(model, "snapkv", budget=16)
    assert len(say(text, past_key_values=cache, **options)[0]["generated_text"].split()) == 6
    assert cache.kept(0)[0][0][-1] == 64 and len(cache.kept(0)[0][0]) == 16 + 5


@pytest.mark.core
def test_text_streamer(model, tokenizer):
    """A streamer prints the same words that generate returns."""
    heard = io.StringIO()
    with redirect_stdout(heard):
        out = model.generate(
            tokens(60).clamp_min(2), past_key_values=kvkeep.Cache(model, "intentkv", budget=16), max_new_tokens=6,
            do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True),
        )  # fmt: skip
    assert heard.getvalue().split() == tokenizer.decode(out[0, 60:]).split()


@pytest.mark.core
@pytest.mark.parametrize("method", ["full", "snapkv", "snapkv+adakv", "intentkv+adakv+pyramid"])
def test_bfloat16_model(method):
    """A bfloat16 model stores bfloat16, equals the stock model with room, and runs without."""
    model, ids = build().to(torch.bfloat16), tokens(50)
    roomy, stock = kvkeep.Cache(model, method, budget=100), DynamicCache(config=model.config)
    assert torch.equal(logits(model, ids, roomy), logits(model, ids, stock))
    for n in (1, 9):
        assert (logits(model, tokens(n), roomy) - logits(model, tokens(n), stock)).abs().max() < 0.15
    assert roomy.backend.store[0].flat.keys.dtype == torch.bfloat16
    tight = kvkeep.Cache(model, method, budget=12)
    assert model.generate(ids, past_key_values=tight, max_new_tokens=4, do_sample=False).shape == (1, 54)


# --- memory that is really freed ------------------------------------------------------------------------------------


def reachable(root) -> dict[int, int]:
    """Bytes by address of every tensor storage reachable from an object's own data, the model excepted."""
    found, todo, done = {}, [root], set()
    while todo:
        thing = todo.pop()
        if id(thing) in done or isinstance(thing, nn.Module):
            continue
        done.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            todo += list(thing.values())
        elif isinstance(thing, list | tuple | set):
            todo += list(thing)
        elif hasattr(thing, "__dict__"):
            todo += list(vars(thing).values())
    return found


@pytest.mark.core
@pytest.mark.parametrize("method", HARD)
def test_bytes_are_those_of_kept_tokens_and_the_rest_is_freed(method, model):
    """nbytes is within 2 % of kept tokens × bytes, through decoding; nothing else holds the keys that were dropped."""
    n, budget, each = 700, 130, (16 + 16) * 4
    cache = prefilled(model, method, budget, tokens(n))
    for _ in range(5):
        held = sum(len(head) for layer in row(cache) for head in layer)
        assert held * each <= cache.nbytes <= 1.02 * held * each
        logits(model, tokens(1), cache)
    gc.collect()
    owned = reachable(cache)
    index = cache.report().index_bytes
    assert sum(owned.values()) <= cache.nbytes + index + 4096
    layer_of_keys = n * 2 * 16 * 4
    alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.shape[-1:] == (16,)]
    held = [t.shape for t in alive if t.untyped_storage().nbytes() >= layer_of_keys]
    assert not held, f"full keys are still held: {held}"


@pytest.mark.core
@pytest.mark.parametrize("method", HARD)
def test_everything_a_compressed_context_holds_is_accounted_for(method, model):
    """Right after a prompt, all the cache's storages together are what the report says, within 2 %."""
    cache = prefilled(model, method, 24, tokens(300))
    report = cache.report()
    told = sum(v for k, v in report.as_dict().items() if k.endswith("bytes") and k != "full_bytes")
    assert sum(reachable(cache).values()) <= 1.02 * told


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("method", HARD)
def test_save_load_and_fork_go_on_identically(method, model, tmp_path):
    """A loaded cache and a fork go on bit-equal to the original, mid-prompt and later, padded rows included."""
    ids, mask = padded([tokens(n, n)[0] for n in LENGTHS])
    cache = kvkeep.Cache(model, method, budget=14, **({"window": 7} if "snap" in method else {}))
    logits(model, ids, cache, attention_mask=mask)
    for number, n in enumerate((6, 1, 1, 20)):
        cache.save(tmp_path / f"c{number}")
        loaded = kvkeep.Cache.load(tmp_path / f"c{number}", model)
        others = [loaded, cache.fork()]
        question = tokens(n, n, rows=3)
        want = logits(model, question, cache)
        for other in others:
            assert torch.equal(logits(model, question, other), want)
            assert kept(other) == kept(cache) and other.nbytes == cache.nbytes
    assert loaded.method == cache.method and loaded.report().as_dict() == cache.report().as_dict()


@pytest.mark.core
def test_damaged_and_foreign_files_are_refused(model, tmp_path):
    """Truncated, tampered, missing or another model's: a clear error each time, never a wrong cache."""
    cache = prefilled(model, "snapkv+adakv")
    cache.save(tmp_path / "good")
    description, tensors = (next((tmp_path / "good").glob(end)) for end in ("*.json", "*.safetensors"))
    text, blob = description.read_text(), tensors.read_bytes()
    flipped = bytearray(blob)
    flipped[-5] ^= 1
    facts = json.loads(text)

    def refused(match: str, other=model) -> None:
        with pytest.raises(BadCacheFile, match=match):
            kvkeep.Cache.load(tmp_path / "good", other)
        description.write_text(text)
        tensors.write_bytes(blob)

    for bad in (blob[: len(blob) // 2], blob[:-1], b"", bytes(flipped)):
        tensors.write_bytes(bad)
        refused(tensors.name)
    changed = [json.dumps(facts | change) for change in ({"budget": 7}, {"format": "x"})]
    for bad in (text[: len(text) // 2], "", "[]", "{}", *changed):
        description.write_text(bad)
        refused(tmp_path.name)
    description.write_bytes(b"\xff\xfe\x00 not text")
    refused(tmp_path.name)
    tensors.unlink()
    refused(tensors.name)
    refused("another model", build(seed=1))
    refused("another model", build(num_hidden_layers=2))
    with pytest.raises(BadCacheFile):
        kvkeep.Cache.load(tmp_path / "nowhere", model)
    assert kept(kvkeep.Cache.load(tmp_path / "good", model)) == kept(cache)


@pytest.mark.core
def test_save_never_deletes_what_it_did_not_write(model, tmp_path):
    """A folder with other people's files is not replaced."""
    cache = prefilled(model)
    cache.save(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with suppress(KvkeepError):
        cache.save(tmp_path / "c")
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    assert kept(kvkeep.Cache.load(tmp_path / "c", model)) == kept(cache)


# --- what a demanding user meets ------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("where", ["prompt", "decode", "turn"])
def test_interrupted_forward_never_leaves_a_wrong_cache(where, model):
    """Ctrl-C between two layers: the cache is as before, or empty, or refuses; it never answers from half a pass."""
    cache = kvkeep.Cache(model, "snapkv", budget=20)
    if where != "prompt":
        logits(model, tokens(60), cache)
    fork = cache.fork()
    new = tokens({"prompt": 60, "decode": 1, "turn": 12}[where], 5)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model, new, cache)
    hook.remove()
    try:
        got = logits(model, new, cache)
    except CacheMisuse:
        return
    assert torch.equal(got, logits(model, new, fork)) and kept(cache) == kept(fork)


@pytest.mark.core
def test_refused_call_leaves_the_cache_as_it_was(model):
    """A mask or a batch of the wrong size is refused before anything happened: the conversation can go on."""
    cache = prefilled(model)
    want = logits(model, tokens(1), cache.fork())
    with pytest.raises(CacheMisuse):
        logits(model, tokens(1, rows=2), cache)
    with pytest.raises(CacheMisuse):
        logits(model, tokens(1), cache, attention_mask=torch.tensor([[0, 1, 1]]))
    assert torch.equal(logits(model, tokens(1), cache), want)


@pytest.mark.core
def test_inference_mode_and_no_grad_mix(model):
    """A cache filled under inference_mode goes on outside it, as a stock cache does."""
    cache = kvkeep.Cache(model, "snapkv", budget=200)
    with torch.inference_mode():
        model(tokens(150), past_key_values=cache)
        model(tokens(1), past_key_values=cache)
    want = logits(model, tokens(1), cache.fork())
    assert torch.equal(logits(model, tokens(1), cache), want)


@pytest.mark.core
@pytest.mark.parametrize("method", EVERY)
def test_smallest_prompts_and_budgets(method, model):
    """One token in, a budget of one (or the least the method allows), a huge one: all run."""
    least = next(b for b in range(1, 20) if fits(method, b))
    for budget in (least, 10**9, 1.0):
        for n in (1, 2, 30):
            cache = kvkeep.Cache(model, method, budget=budget)
            out = model.generate(tokens(n), past_key_values=cache, max_new_tokens=3, do_sample=False)
            assert out.shape == (1, n + 3)
        q, k, v = random_qkv(n=1)
        assert kvkeep.select(method, q, k, v, budget).tolist() == [[0], [0]]


def fits(method: str, budget: int) -> bool:
    try:
        parse(method).check(budget)
    except BadParameter:
        return False
    return True


@pytest.mark.core
def test_one_token_fits_any_fraction(model):
    """Where n <= B nothing is dropped, so nothing can be too small: B is at least 1."""
    q, k, v = random_qkv(n=1)
    assert kvkeep.select("streamingllm", q, k, v, 0.5).tolist() == [[0], [0]]


@pytest.mark.core
@pytest.mark.parametrize("side", ["right", "empty row"])
def test_unusual_padding_equals_solo_runs(side, model):
    """Right padding, or a row without any token yet, changes nothing for the others."""
    rows = [tokens(40, 1)[0], tokens(25, 2)[0]]
    ids, mask = padded(rows)
    if side == "right":
        ids[1], mask[1] = ids[1].roll(25), mask[1].roll(25)
    else:
        rows[1], mask[1] = rows[1][:0], 0
    cache = kvkeep.Cache(model, "snapkv+adakv", budget=12)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits(model, ids, cache, attention_mask=mask, position_ids=positions)
    mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    where = torch.stack([torch.arange(len(r), len(r) + 3) for r in rows])
    got = logits(model, tokens(3, rows=2), cache, attention_mask=mask, position_ids=where)
    for r, solo in enumerate(rows):
        alone = kvkeep.Cache(model, "snapkv+adakv", budget=12)
        if len(solo):
            logits(model, solo[None], alone)
        want = logits(model, tokens(3, rows=2)[r : r + 1], alone)
        assert (got[r] - want[0]).abs().max() < 1e-4 and row(cache, r) == row(alone)


@pytest.mark.core
def test_embeddings_as_input(model):
    """inputs_embeds gives what input_ids give."""
    a, b = (kvkeep.Cache(model, "snapkv", budget=20) for _ in range(2))
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(tokens(60)), past_key_values=a)
    logits(model, tokens(60), b)
    assert kept(a) == kept(b) and torch.equal(logits(model, tokens(4), a), logits(model, tokens(4), b))


@pytest.mark.core
def test_select_takes_any_float_layout_and_gradients():
    """Half precision, non-contiguous and gradient-carrying tensors decide like plain ones, and carry no graph on."""
    for method in EVERY:
        q, k, v = random_qkv()
        want = kvkeep.select(method, q, k, v, 30).tolist()
        turned = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in (q, k, v)]
        chosen = kvkeep.select(method, *turned, 30)
        assert chosen.tolist() == want and not chosen.index.requires_grad
        half = [t.half() for t in (q, k, v)]
        same = [t.float() for t in half]
        assert kvkeep.select(method, *half, 30).tolist() == kvkeep.select(method, *same, 30).tolist()


@pytest.mark.core
@pytest.mark.trap(14)
def test_row_with_one_token_in_a_longer_turn_equals_its_solo_run(model):
    """One new token is a decode step for its row, whatever its neighbours are doing."""
    turns = [[tokens(mine, mine)[0], tokens(theirs, theirs)[0]] for mine, theirs in ((30, 25), (1, 12), (9, 8))]
    together, mask, alone = kvkeep.Cache(model, "snapkv", budget=14), None, kvkeep.Cache(model, "snapkv", budget=14)
    for turn in turns:
        got, mask = forward_rows(model, together, turn, mask)
        assert (got[0] - logits(model, turn[0][None], alone)[0]).abs().max() < 1e-4
        assert row(together) == row(alone)


@pytest.mark.core
def test_forward_with_gradients_enabled_is_silent(model):
    """A plain model(ids, past_key_values=cache) outside no_grad works, warns of nothing and holds no graph."""
    cache, always = kvkeep.Cache(model, "snapkv", budget=20), torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch tells some things only once per process
    try:
        with torch.enable_grad():
            for n in (60, 1, 5):
                model(tokens(n), past_key_values=cache)
    finally:
        torch.set_warn_always(always)
    assert not cache.backend.store[0].flat.keys.requires_grad and not any(
        q.requires_grad for q in cache.backend.query_buffer.queries.values()
    )


@pytest.mark.core
def test_another_models_cache_is_refused(model):
    """A cache serves the model it was made for; another one is refused, whether or not it has caches of its own."""
    for other in (build(seed=5), build(num_hidden_layers=2), build(num_hidden_layers=4)):
        for _ in range(2):
            with pytest.raises(KvkeepError):
                logits(other, tokens(30), kvkeep.Cache(model, "snapkv", budget=20))
            kvkeep.Cache(other, "snapkv", budget=20)


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv"])
@pytest.mark.parametrize("first", [True, False])
def test_autocast_may_come_and_go(method, first, model):
    """Prefill under autocast and decode outside it, or the reverse, as with a stock cache."""
    cache = kvkeep.Cache(model, method, budget=100)
    for number, n in enumerate((120, 1, 1, 5)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=(number == 0) == first):
            assert logits(model, tokens(n), cache).isfinite().all()


def test_compiled_model_may_ask_for_mask_sizes(model):
    """Under torch.compile lengths become symbols as soon as they vary; our layers must bear that."""
    cache = kvkeep.Cache(model, "snapkv", budget=20)
    ask = torch.compile(lambda x: x + cache.layers[0].get_mask_sizes(x.shape[0])[0], backend="eager", dynamic=True)
    assert ask(torch.zeros(7)).tolist() == [7.0] * 7


@pytest.mark.core
def test_deepcopy_forks_and_pickle_says_save(model):
    """deepcopy gives a fork that shares only the model; pickle, which would drag the model along, points to save()."""
    cache = prefilled(model)
    want, twin = kept(cache), copy.deepcopy(cache)
    logits(model, tokens(12), twin)
    assert kept(cache) == want and cache.get_seq_length() == 90 and twin.model is model
    with pytest.raises(CacheMisuse, match="save"):
        pickle.dumps(cache)


@pytest.mark.core
def test_saved_cache_knows_other_weights_and_other_dtypes(model, tmp_path):
    """Weights that differ beyond their first row are another model; another dtype is refused or turned to."""
    cache = prefilled(model)
    cache.save(tmp_path / "c")
    other = build()
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight[16:] += 1
    with pytest.raises(BadCacheFile):
        kvkeep.Cache.load(tmp_path / "c", other)
    rounded = build().bfloat16()
    prefilled(copy.deepcopy(rounded).float()).save(tmp_path / "r")
    try:
        loaded = kvkeep.Cache.load(tmp_path / "r", rounded)
    except BadCacheFile:
        return
    assert logits(rounded, tokens(1), loaded).isfinite().all()


@pytest.mark.core
def test_settings_that_do_not_change_attention_do_not_refuse_a_file(model, tmp_path):
    """Generation settings, use_cache or the attention backend are not the model."""
    cache = prefilled(model)
    cache.save(tmp_path / "c")
    same = build(impl="eager")
    same.config.use_cache = False
    assert kept(kvkeep.Cache.load(tmp_path / "c", same)) == kept(cache)


@pytest.mark.core
def test_saved_model_does_not_mention_us(model, tmp_path):
    """save_pretrained after our use writes a config that loads where kvkeep is not installed."""
    prefilled(model)
    model.save_pretrained(tmp_path)
    assert "kvkeep" not in (tmp_path / "config.json").read_text()


@pytest.mark.core
def test_wrong_kinds_of_arguments_are_named(model):
    """Not a method, not a model, not a scale: errors of ours that say so."""
    q, k, v = random_qkv()
    for attempt in (
        lambda: kvkeep.Cache(model, None, budget=3),
        lambda: kvkeep.Cache("gpt2", "snapkv", budget=3),
        lambda: kvkeep.select("snapkv", q, k, v, 30, scale=float("nan")),
        lambda: kvkeep.select("snapkv", q, k, v, 30, layer=0.5, layers=2),
        lambda: kvkeep.select("snapkv", q[..., :0], k[..., :0], v, 30),
    ):
        with pytest.raises(KvkeepError):
            attempt()
    numpy = pytest.importorskip("numpy")
    assert len(kvkeep.select("snapkv", q, k, v, numpy.int64(30)).tolist()[0]) == 30
