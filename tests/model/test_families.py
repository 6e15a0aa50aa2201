"""Every model family: itself while nothing is dropped, observed as it attends, compressed; or refused by name."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import EVICTING
from families import CASES, FAMILIES, SIZES, WINDOW, build, prompt, randomised
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

import kvkeep
from kvkeep.compress.attention import attention
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.errors import CacheMisuse, KvkeepError, UnsupportedModel
from kvkeep.model.hf_cache import CompressedLayer

METHODS = [*EVICTING, "snapkv+adakv", "intentkv+pyramid", "tova+adakv+pyramid", "rkv:buffer=3", "rkv:buffer=4"]
GENERATED = ["full", "kvkeep", "h2o", "snapkv+adakv", "kvkeep_context", "kvzip"]  # one of each way through `generate`
BUDGET, TOKENS, STEPS = 16, 60, 5

families = pytest.mark.parametrize(("name", "kind"), CASES, ids=["-".join(case) for case in CASES])


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def methods_of(name: str, kind: str) -> list[str]:
    """All of them for each family: its attention implementations, which no method knows of, take turns."""
    kinds = FAMILIES[name].kinds
    return METHODS[kinds.index(kind) :: len(kinds)]


def stock(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def is_refused(name: str, method: str) -> bool:
    """Sliding-window and linear layers beside full ones cannot have a text fed again."""
    full = FAMILIES[name].full
    return parse(method).needs_passes and 0 < len(full) < len(stock(build(name)).layers)


def answer(model: PreTrainedModel, cache: Any, ids: Tensor, fed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits of the prompt [n, vocab], and of STEPS tokens decoded one by one: greedily, or those in `fed`."""
    first = model(ids, past_key_values=cache, use_cache=True).logits[0]
    logits = [first[-1]]
    for step in range(STEPS):
        token = logits[-1].argmax() if fed is None else fed[step]
        logits.append(model(token.view(1, 1), past_key_values=cache, use_cache=True).logits[0, -1])
    return first, torch.stack(logits)


def greedy(model: PreTrainedModel, cache: Any, ids: Tensor, tokens: int = STEPS) -> Tensor:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, do_sample=False
    )
    return out[0, ids.shape[1] :]


# while nothing is dropped


@pytest.mark.core
@families
def test_with_room_for_all_nothing_changes(name: str, kind: str) -> None:
    model, untouched, ids = build(name, kind), build(name, kind), prompt(TOKENS)
    first, decoded = answer(untouched, stock(untouched), ids)
    tokens = decoded.argmax(-1)[:-1]
    assert torch.equal(model(ids).logits[0], first), "the same weights, before any cache of ours"

    for method in (each for each in methods_of(name, kind) if not is_refused(name, each)):
        mine, mine_decoded = answer(model, kvkeep.Cache(model, method, budget=TOKENS + STEPS), ids, tokens)
        assert torch.equal(mine, first), method
        torch.testing.assert_close(
            mine_decoded, decoded, atol=1e-5, rtol=0, msg=lambda m, method=method: f"{method}: {m}"
        )
        if method in GENERATED:
            assert torch.equal(greedy(model, kvkeep.Cache(model, method, budget=1.0), ids), tokens), method

    for same in (untouched, model, copy.deepcopy(model)):  # the last two could speak to our caches
        assert torch.equal(same(ids, use_cache=False).logits[0], first)
        again, again_decoded = answer(same, stock(same), ids)
        assert torch.equal(again, first)
        assert torch.equal(again_decoded, decoded)
    assert torch.equal(greedy(model, stock(model), ids), tokens)


@pytest.mark.core
@families
def test_a_stock_batch_with_padding_is_untouched(name: str, kind: str) -> None:
    model, untouched = build(name, kind), build(name, kind)
    ids, shown = padded()
    before = untouched(ids, attention_mask=shown, past_key_values=stock(untouched)).logits
    kvkeep.Cache(model, "snapkv", budget=BUDGET)
    assert torch.equal(model(ids, attention_mask=shown, past_key_values=stock(model)).logits, before)
    cache = kvkeep.Cache(model, "snapkv", budget=ids.shape[1])
    assert torch.equal(
        model(ids, attention_mask=shown, past_key_values=cache).logits[shown.bool()], before[shown.bool()]
    )


# what the scorer sees


class Recorder:
    """A scorer that writes down the attention of the last `window` queries of every observation."""

    def __init__(self, window: int):
        self.window = window
        self.seen: dict[int, list[Tensor]] = {}  # layer -> attention per row, [kv_heads, group, window, n]

    def __call__(self, seen: Any, budget: int) -> Tensor:
        rows = attention(seen, self.window)
        self.seen.setdefault(seen.layer, []).append(rows)
        return rows.mean((1, 2))

    @property
    def method(self) -> Method:
        return Method("recorder", scorer=self, observation_window=self.window)


def eager_attention(name: str, ids: Tensor, shown: Tensor | None = None) -> list[Tensor]:
    """The model's own attention in its full-attention layers. [rows, heads, n, n] each"""
    full = FAMILIES[name].full
    weights = build(name, "eager")(ids, attention_mask=shown, output_attentions=True, use_cache=False).attentions
    return list(weights) if len(weights) == len(full) else [weights[layer] for layer in full]  # linear layers have none


def last_rows(weights: Tensor, window: int) -> Tensor:
    """[heads, n, n] -> [kv_heads, group, window, n]"""
    return weights[:, -window:].unflatten(0, (SIZES["num_key_value_heads"], -1))


def padded() -> tuple[Tensor, Tensor]:
    """Two rows, the second with 11 tokens of left padding, and their attention mask."""
    ids, shown = prompt(40, rows=2, seed=1), torch.ones(2, 40, dtype=torch.long)
    ids[1, :11], shown[1, :11] = SIZES["pad_token_id"], 0
    return ids, shown


FULL_CASES = [case for case in CASES if FAMILIES[case[0]].full]
compressed = pytest.mark.parametrize(("name", "kind"), FULL_CASES, ids=["-".join(case) for case in FULL_CASES])


@pytest.mark.core
@compressed
def test_the_scorer_sees_the_models_own_attention(name: str, kind: str) -> None:
    model, ids, recorder = build(name, kind), prompt(TOKENS), Recorder(window=13)
    model(ids, past_key_values=kvkeep.Cache(model, recorder.method, budget=BUDGET))
    assert sorted(recorder.seen) == list(range(len(FAMILIES[name].full)))
    for layer, truth in enumerate(eager_attention(name, ids)):
        (mine,) = recorder.seen[layer]
        torch.testing.assert_close(mine, last_rows(truth[0], 13), atol=1e-5, rtol=0)


@pytest.mark.core
@compressed
def test_the_scorer_sees_the_same_when_the_prompt_comes_in_pieces(name: str, kind: str) -> None:
    model, ids, recorder = build(name, kind), prompt(TOKENS), Recorder(window=25)
    cache = kvkeep.Cache(model, recorder.method, budget=45)
    for piece in ids.split([23, 20, 17], dim=1):  # only the last exceeds the budget; it is shorter than the window
        model(piece, past_key_values=cache)
    for layer, truth in enumerate(eager_attention(name, ids)):
        (mine,) = recorder.seen[layer]
        torch.testing.assert_close(mine, last_rows(truth[0], 25), atol=1e-5, rtol=0)


@pytest.mark.core
@compressed
def test_the_scorer_sees_each_padded_row_as_the_model_does(name: str, kind: str) -> None:
    model, recorder = build(name, kind), Recorder(window=13)
    ids, shown = padded()
    model(ids, attention_mask=shown, past_key_values=kvkeep.Cache(model, recorder.method, budget=BUDGET))
    for layer, truth in enumerate(eager_attention(name, ids, shown)):
        for row, mine in enumerate(recorder.seen[layer]):
            real = shown[row].bool()
            torch.testing.assert_close(mine, last_rows(truth[row][:, real][:, :, real], 13), atol=1e-5, rtol=0)


# compressed


def lengths(cache: kvkeep.Cache) -> Tensor:
    """Tokens kept, [layers, kv_heads], of a cache of one row."""
    return torch.tensor([[len(head) for head in cache.kept(layer)[0]] for layer in cache.compressed_layers])


def expect_within_budget(cache: kvkeep.Cache, method: str, seen: int) -> None:
    kept = lengths(cache)
    if method == "full":
        assert kept.eq(seen).all()
    elif "pyramid" in method or parse(method).layers.layer_weight:
        # a layer whose share grows between two turns cannot take back what it dropped
        assert kept.sum() == kept.numel() * BUDGET or (seen > TOKENS and kept.sum() < kept.numel() * BUDGET), method
    elif parse(method).across_layers:
        assert kept.sum() == kept.numel() * BUDGET, method
    elif parse(method).heads.needs_scores:
        assert kept.sum(1).eq(kept.shape[1] * BUDGET).all(), method
    else:
        assert kept.eq(BUDGET).all(), method


@pytest.mark.core
@pytest.mark.parametrize("name, kind, method", [(*case, method) for case in FULL_CASES for method in methods_of(*case)])
def test_compressed_generation(name: str, kind: str, method: str) -> None:
    model, ids, full = build(name, kind), prompt(TOKENS), FAMILIES[name].full
    if is_refused(name, method):
        with pytest.raises(UnsupportedModel, match=f"'{method}' runs the model again after a prompt"):
            kvkeep.Cache(model, method, budget=BUDGET)
        return
    cache = kvkeep.Cache(model, method, budget=BUDGET)
    assert tuple(cache.compressed_layers) == full
    last = model(ids, past_key_values=cache).logits[0, -1]
    expect_within_budget(cache, method, TOKENS)
    after_prompt = lengths(cache)

    if method in GENERATED:
        cache = kvkeep.Cache(model, method, budget=BUDGET)
        last = greedy(model, cache, ids, 5)[-1]
    else:
        for _ in range(4):
            last = model(last.argmax().view(1, 1), past_key_values=cache).logits[0, -1]
        last = last.argmax()
    buffer = parse(method).schedule.every
    added = 4 % buffer if buffer else 4  # back at the budget whenever the buffer is full; the last token was never fed
    assert torch.equal(lengths(cache), after_prompt + added)
    assert cache.report().layers == len(full)
    assert cache.report().tokens_seen == [TOKENS + 4]

    logits = model(torch.cat([last.view(1, 1), prompt(6, seed=2)], 1), past_key_values=cache).logits
    assert logits.isfinite().all()
    expect_within_budget(cache, method, TOKENS + 4 + 7)
    assert cache.get_seq_length() == TOKENS + 4 + 7


@pytest.mark.core
@families
def test_only_full_attention_layers_are_ours(name: str, kind: str) -> None:
    model, ids = build(name, kind), prompt(TOKENS)
    cache = kvkeep.Cache(model, "snapkv", budget=BUDGET)
    theirs = stock(model)
    model(ids, past_key_values=cache)
    model(ids, past_key_values=theirs)
    for i, (mine, same) in enumerate(zip(cache.layers, theirs.layers, strict=True)):
        if i in FAMILIES[name].full:
            assert type(mine) is CompressedLayer
        else:
            assert type(mine) is type(same)
            assert type(same) is not transformers.cache_utils.DynamicLayer
    report, width = cache.report(), SIZES["num_key_value_heads"] * head_dim(model)
    assert report.layers == len(FAMILIES[name].full)
    assert report.full_bytes == report.layers * TOKENS * 2 * width * 4
    assert report.bytes == cache.nbytes == report.layers * BUDGET * 2 * width * 4


def head_dim(model: PreTrainedModel) -> int:
    return getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads


@pytest.mark.core
def test_a_model_of_sliding_layers_only_generates_as_ever() -> None:
    model, ids = build("mistral_sliding", "sdpa"), prompt(TOKENS)
    tokens = greedy(model, stock(model), ids)
    for method in METHODS:
        cache = kvkeep.Cache(model, method, budget=BUDGET)
        assert torch.equal(greedy(model, cache, ids), tokens)
        assert (cache.nbytes, cache.report().layers, cache.compressed_layers) == (0, 0, [])
        assert cache.get_seq_length() == TOKENS + STEPS - 1
        assert all(layer.keys.shape[-2] < WINDOW for layer in cache.layers)
        str(cache.report())


@pytest.mark.core
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_next"])
def test_layers_left_alone_still_know_a_follow_up(name: str) -> None:
    """Sliding and linear layers beside ours go on as they would beside stock ones, over turns and single tokens."""
    model, untouched = build(name), build(name)
    mine, theirs = kvkeep.Cache(model, "snapkv", budget=512), stock(untouched)
    for tokens in (30, 9, 1, 1, 14, 1):
        ids = prompt(tokens, seed=tokens)
        torch.testing.assert_close(
            model(ids, past_key_values=mine).logits, untouched(ids, past_key_values=theirs).logits, atol=1e-5, rtol=0
        )


# refused


def tiny(kind: str, config: str = "", **settings: Any) -> PreTrainedModel:
    made = getattr(transformers, config or kind.removesuffix("ForCausalLM") + "Config")(**{**SIZES, **settings})
    return randomised(getattr(transformers, kind)(made))


LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
}
UNOBSERVABLE = {
    "DeepseekV3ForCausalLM": lambda: tiny("DeepseekV3ForCausalLM", **LATENT),
    "DeepseekV2ForCausalLM": lambda: tiny("DeepseekV2ForCausalLM", **LATENT),
    "Gemma3nForCausalLM": lambda: tiny(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=101,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        intermediate_size=[40] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "T5ForConditionalGeneration": lambda: tiny(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=48,
        d_ff=40,
        d_kv=8,
        num_layers=2,
        num_heads=6,
        decoder_start_token_id=0,
    ),
    "BertForMaskedLM": lambda: tiny("BertForMaskedLM", "BertConfig"),
    "ModernBertForMaskedLM": lambda: tiny("ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=0, sep_token_id=0),
    "Gemma3ForCausalLM, bidirectional": lambda: tiny(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        head_dim=8,
        layer_types=["full_attention"] * 2,
        use_bidirectional_attention=True,
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("name", UNOBSERVABLE)
def test_what_cannot_be_observed_is_refused_by_name_and_left_as_it_was(name: str) -> None:
    model = UNOBSERVABLE[name]()
    attention_before = model.config.get_text_config(decoder=True)._attn_implementation
    with pytest.raises(UnsupportedModel, match=type(model).__name__):
        kvkeep.Cache(model, "snapkv", budget=BUDGET)
    assert model.config.get_text_config(decoder=True)._attn_implementation == attention_before


def llama_with(attention: type, kind: str, layers: int = 2) -> PreTrainedModel:
    """A Llama whose attention modules are of another class."""
    model = build("llama", kind)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    for layer in model.model.layers:
        layer.self_attn.__class__ = attention
    return model


class Altered(LlamaAttention):
    """Passes its keys through one more operation on their way from cache to attention."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any):
        def update(*states: Any, **extra: Any) -> tuple[Tensor, Tensor]:
            keys, values = past_key_values.update(*states, **extra)
            return keys * 1.0, values

        altering = None if past_key_values is None else SimpleNamespace(update=update)
        return super().forward(*args, past_key_values=altering, **kwargs)


class Biased(LlamaAttention):
    """Prefers early tokens by a bias that only its own attention function knows."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any):
        self.bias = torch.linspace(2, -2, 200)
        return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)


def eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
):
    """The eager function of the attention classes in this file, found beside them as transformers' own are."""
    bias = getattr(module, "bias", torch.zeros(200))[: key.shape[2]].expand(1, 1, query.shape[2], -1)
    hidden = bias if attention_mask is None else bias + attention_mask
    return modeling_llama.eager_attention_forward(module, query, key, value, hidden, **kwargs)


class MaskBiased(LlamaAttention):
    """Adds its bias to the mask, as ALiBi models do."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any):
        n = hidden_states.shape[1]
        causal = torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return super().forward(hidden_states, attention_mask=causal[None, None] + torch.linspace(2, -2, n), **kwargs)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [1, 2])
def test_keys_altered_behind_the_cache_are_noticed(kind: str, layers: int) -> None:
    model = llama_with(Altered, kind, layers)
    cache = kvkeep.Cache(model, "snapkv", budget=BUDGET)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        for ids in (prompt(TOKENS), prompt(1)):  # one layer alone is noticed when the next token comes
            model(ids, past_key_values=cache)
    assert model(prompt(TOKENS), past_key_values=stock(model)).logits.isfinite().all(), "a stock cache is fine"


@pytest.mark.parametrize(
    "pieces", [[TOKENS], [1, TOKENS - 1], [1, 1, TOKENS - 2]], ids=["whole", "one-first", "two-first"]
)
def test_a_bias_nobody_told_us_of_is_noticed(pieces: list[int]) -> None:
    model = llama_with(Biased, "eager")
    cache = kvkeep.Cache(model, "snapkv", budget=BUDGET)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        for ids in prompt(TOKENS).split(pieces, dim=1):
            model(ids, past_key_values=cache)


def test_attention_called_twice_for_one_update_is_noticed() -> None:
    model = tiny("DiffLlamaForCausalLM")  # the difference of two attentions over the same keys
    with pytest.raises(UnsupportedModel, match="DiffLlamaForCausalLM"):
        model(prompt(TOKENS), past_key_values=kvkeep.Cache(model, "full"))


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_bias_in_the_mask_is_noticed(kind: str) -> None:
    model = llama_with(MaskBiased, kind)
    cache = kvkeep.Cache(model, "snapkv", budget=BUDGET)
    with pytest.raises(KvkeepError):
        model(prompt(TOKENS), past_key_values=cache)
    assert cache.nbytes == 0


def test_attention_changed_after_the_cache_was_made_is_noticed() -> None:
    model, ids = build("llama", "sdpa"), prompt(TOKENS)
    cache = kvkeep.Cache(model, "snapkv", budget=BUDGET)
    model.set_attn_implementation("eager")
    with pytest.raises(CacheMisuse, match="LlamaForCausalLM"):
        model(ids, past_key_values=cache)
    assert torch.equal(model(ids).logits, build("llama", "eager")(ids).logits)
    assert greedy(model, kvkeep.Cache(model, "snapkv", budget=BUDGET), ids).numel() == STEPS


@pytest.mark.parametrize("before", [[], [TOKENS]], ids=["first-pass", "later-pass"])
def test_a_pass_cut_short_between_layers_is_noticed_or_undone(before: list[int]) -> None:
    """Ctrl-C or a lack of memory strikes anywhere, not only inside attention."""
    model, clean, next_ids = build("llama"), build("llama"), prompt(9, seed=3)
    mine, theirs = kvkeep.Cache(model, "full"), stock(clean)
    for tokens in before:
        model(prompt(tokens), past_key_values=mine)
        clean(prompt(tokens), past_key_values=theirs)

    def strike(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        model(next_ids, past_key_values=mine)
    hook.remove()
    try:
        logits = model(next_ids, past_key_values=mine).logits
    except CacheMisuse:
        return
    torch.testing.assert_close(logits, clean(next_ids, past_key_values=theirs).logits, atol=1e-5, rtol=0)


# the model stays itself


class Elsewhere(LlamaAttention):
    """An attention class that lives in another module than the eager function it uses."""

    __module__ = "decimal"  # any module without an eager_attention_forward


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_subclassed_attention_is_what_it_inherits(kind: str) -> None:
    model, ids = llama_with(Elsewhere, kind), prompt(TOKENS)
    before = model(ids).logits
    cache = kvkeep.Cache(model, "snapkv", budget=TOKENS)
    assert torch.equal(model(ids, past_key_values=cache).logits, before)
    assert torch.equal(model(ids).logits, before)


def test_attentions_can_still_be_asked_for() -> None:
    model, ids = build("llama", "eager"), prompt(TOKENS)
    before = model(ids, output_attentions=True).attentions
    kvkeep.Cache(model, "snapkv", budget=BUDGET)
    assert all(torch.equal(a, b) for a, b in zip(model(ids, output_attentions=True).attentions, before, strict=True))


def test_a_saved_model_does_not_mention_us(tmp_path: Any) -> None:
    model, ids = build("llama", "sdpa"), prompt(TOKENS)
    kvkeep.Cache(model, "snapkv", budget=BUDGET)
    model.save_pretrained(tmp_path)
    assert "kvkeep" not in (tmp_path / "config.json").read_text()
    assert torch.equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_a_cache_with_linear_layers_is_saved_or_says_it_cannot_be(tmp_path: Any) -> None:
    model, ids, more = build("qwen3_next"), prompt(TOKENS), prompt(5, seed=2)
    cache = kvkeep.Cache(model, "snapkv", budget=BUDGET)
    model(ids, past_key_values=cache)
    try:
        cache.save(tmp_path / "cache")
    except CacheMisuse:
        assert not list(tmp_path.iterdir())
        return
    loaded = kvkeep.Cache.load(tmp_path / "cache", model)
    assert torch.equal(model(more, past_key_values=loaded).logits, model(more, past_key_values=cache).logits)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_next"])
def test_forks_of_mixed_models_go_separate_ways(name: str) -> None:
    model, questions = build(name), [prompt(5, seed=2), prompt(5, seed=3)]
    cache = kvkeep.Cache(model, "snapkv", budget=BUDGET)
    model(prompt(TOKENS), past_key_values=cache)
    first, second, again = (model(q, past_key_values=cache.fork()).logits for q in (*questions, questions[0]))
    assert torch.equal(first, again)
    assert torch.equal(model(questions[1], past_key_values=cache).logits, second)
