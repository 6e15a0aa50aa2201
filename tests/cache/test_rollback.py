"""A forward pass that fails, wherever it does: its retry equals an undisturbed run, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from conftest import make_llama
from families import SIZES, WINDOW, build, prompt, randomised
from masked_reference import kept, logits, tokens
from torch import nn

import kvkeep
from kvkeep.errors import CacheMisuse
from kvkeep.storage import ragged as home

IDS = prompt(100, seed=1)


@contextmanager
def cut_short(module: nn.Module):
    """The next pass stops before this module."""

    def strike(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = module.register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        yield
    hook.remove()


def read(model: Any, *caches: kvkeep.Cache, start: int = 0, end: int) -> None:
    """A prompt, or single steps."""
    pieces = [(start, end)] if not start else [(t, t + 1) for t in range(start, end)]
    for cache in caches:
        for a, b in pieces:
            model(IDS[:, a:b], past_key_values=cache)


def fails_at(call: int) -> Callable:
    """Attention over a cache, with no room for one of its calls."""
    real, calls = home.segment_attention, []

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError
        return real(*args, **kwargs)

    return attend


@pytest.mark.parametrize("name", ["h2o", "tova", "streamingllm", "ahakv"])
def test_a_second_turn_cut_short_after_tokens_were_swapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama()
    cache, clean = kvkeep.Cache(model, name, 30), kvkeep.Cache(model, name, 30)
    read(model, cache, clean, end=60)
    read(model, cache, clean, start=60, end=75)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(home, "segment_attention", fails_at(1))
        model(IDS[:, 75:90], past_key_values=cache)
    got, want = (model(IDS[:, 75:90], past_key_values=each).logits for each in (cache, clean))
    assert torch.equal(got, want)
    assert all(cache.kept(i) == clean.kept(i) for i in range(4))


def test_no_room_to_put_swapped_tokens_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama()
    cache, clean = kvkeep.Cache(model, "h2o", 30), kvkeep.Cache(model, "h2o", 30)
    read(model, cache, clean, end=60)
    read(model, cache, clean, start=60, end=75)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(home.RaggedLayer, "hold", full)
        model(IDS[:, 75:90], past_key_values=cache)
    got, want = (model(IDS[:, 75:90], past_key_values=each).logits for each in (cache, clean))
    assert torch.equal(got, want)


def test_rows_chosen_after_a_pass_cut_short() -> None:
    model = make_llama()
    cache, clean = kvkeep.Cache(model, "full"), kvkeep.Cache(model, "full")
    read(model, cache, clean, end=60)
    with cut_short(model.model.layers[2]):
        model(IDS[:, 60:61], past_key_values=cache)
    for each in (cache, clean):
        each.batch_repeat_interleave(2)
    step = IDS[:, 60:61].expand(2, -1)
    got, want = (model(step, past_key_values=each).logits for each in (cache, clean))
    assert torch.equal(got, want)


def test_only_queries_of_the_failed_step_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Window 8: the third layer fails before it has noted anything."""
    model = make_llama()
    cache, clean = (kvkeep.Cache(model, "snapkv", 80, schedule=50, window=8) for _ in range(2))
    read(model, cache, clean, end=60)
    read(model, cache, clean, start=60, end=65)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(home, "segment_attention", fails_at(3))
        read(model, cache, start=65, end=66)
    read(model, cache, clean, start=65, end=67)
    for who, queries in clean.backend.query_buffer.queries.items():
        torch.testing.assert_close(cache.backend.query_buffer.queries[who], queries)


def gemma(*kinds: str) -> Any:
    config = transformers.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": len(kinds)}, head_dim=16, sliding_window=WINDOW,
        layer_types=[f"{kind}_attention" for kind in kinds],
    )  # fmt: skip
    return randomised(transformers.Gemma3ForCausalLM(config))


def lfm(*kinds: str) -> Any:
    """Short convolutions: states without a length, in front of a layer of ours and behind it."""
    settings = SIZES | {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    return randomised(transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**settings)))


MIXED = {
    "gemma, before our first layer": (lambda: gemma("sliding", "full", "sliding"), "layers.0.mlp"),
    "gemma, behind our last": (lambda: gemma("sliding", "full", "sliding"), "layers.2"),
    "qwen, before our first": (lambda: build("qwen3_next"), "layers.0.mlp"),
    "qwen, between ours": (lambda: build("qwen3_next"), "layers.1.mlp"),
    "lfm, behind our last": (lambda: lfm("conv", "full_attention", "conv"), "layers.2"),
}


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("case", MIXED)
def test_a_pass_cut_short_in_other_layers_is_noticed(case: str, tokens: int) -> None:
    make, where = MIXED[case]
    model = make()
    cache, more = kvkeep.Cache(model, "full"), prompt(tokens, seed=3)
    model(prompt(30), past_key_values=cache)
    with cut_short(model.model.get_submodule(where)):
        model(more, past_key_values=cache)
    for _ in range(2):  # it stays noticed
        with pytest.raises(CacheMisuse, match="reset"):
            model(more, past_key_values=cache)
    with pytest.raises(CacheMisuse, match="reset"):
        cache.fork()
    cache.reset()
    fresh = kvkeep.Cache(model, "full")
    got, want = (model(prompt(30), past_key_values=each).logits for each in (cache, fresh))
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", MIXED)
def test_a_first_pass_cut_short_in_other_layers_is_noticed(case: str) -> None:
    make, where = MIXED[case]
    model = make()
    cache = kvkeep.Cache(model, "full")
    with cut_short(model.model.get_submodule(where)):
        model(prompt(30), past_key_values=cache)
    with pytest.raises(CacheMisuse, match="reset"):
        model(prompt(30), past_key_values=cache)


@pytest.mark.parametrize(
    "make", [lambda: gemma("sliding", "full", "sliding"), lambda: lfm("conv", "full_attention", "conv")]
)
def test_other_layers_are_not_suspected_without_reason(make: Callable) -> None:
    model = make()
    cache, theirs = kvkeep.Cache(model, "full"), transformers.DynamicCache(config=model.config)
    for ids in (prompt(30), prompt(1, seed=3), prompt(4, seed=4), prompt(1, seed=5)):
        cache = cache.fork()
        got, want = (model(ids, past_key_values=each).logits for each in (cache, theirs))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_what_was_refused_in_training_goes_on_after_eval() -> None:
    model = make_llama(attention_dropout=0.1)
    cache, clean = kvkeep.Cache(model, "snapkv", 30), kvkeep.Cache(model, "snapkv", 30)
    read(model, cache, clean, end=60)
    model.train()
    with pytest.raises(CacheMisuse, match="eval"):
        read(model, cache, start=60, end=61)
    model.eval()
    got, want = (model(IDS[:, 60:61], past_key_values=each).logits for each in (cache, clean))
    assert torch.equal(got, want)


def test_a_cache_goes_on_after_a_refused_mask() -> None:
    model = make_llama()
    cache, clean = kvkeep.Cache(model, "snapkv", 30), kvkeep.Cache(model, "snapkv", 30)
    read(model, cache, clean, end=60)
    for shape in [(1, 1, 2, 62), (1, 1, 60, 60)]:  # the second is that of the mask made for the prompt
        with pytest.raises(CacheMisuse, match="custom attention mask"):
            model(IDS[:, : shape[2]], past_key_values=cache, attention_mask=torch.zeros(shape))
    got, want = (model(IDS[:, 60:61], past_key_values=each).logits for each in (cache, clean))
    assert torch.equal(got, want)


def test_a_refused_mask_after_other_layers_have_run_is_noticed() -> None:
    model = build("qwen3_next", "sdpa")
    cache = kvkeep.Cache(model, "full")
    model(prompt(30), past_key_values=cache)
    with pytest.raises(CacheMisuse, match="custom attention mask"):
        model(prompt(2), past_key_values=cache, attention_mask=torch.zeros(1, 1, 2, 32))
    with pytest.raises(CacheMisuse, match="reset"):
        model(prompt(2), past_key_values=cache)


def test_the_wrong_model_leaves_a_cache_to_the_right_one() -> None:
    model, other = make_llama(), make_llama(seed=1)
    cache = kvkeep.Cache(model, "full")
    kvkeep.Cache(other, "full")
    with pytest.raises(CacheMisuse, match="another"):
        read(other, cache, end=60)
    read(model, cache, end=60)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_mask_copied_to_another_device_still_tells_its_padding(kind: str) -> None:
    """What accelerate does between the layers of a model spread over several devices."""
    model = make_llama()
    model.set_attn_implementation(kind)
    ids, mask = torch.cat([IDS, IDS.flip(1)]), torch.ones(2, 60, dtype=torch.long)
    mask[0, :7] = 0
    clean, cache = kvkeep.Cache(model, "snapkv", 30), kvkeep.Cache(model, "snapkv", 30)
    want = model(ids[:, :60], attention_mask=mask, past_key_values=clean).logits

    def move(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(move, with_kwargs=True)
    got = model(ids[:, :60], attention_mask=mask, past_key_values=cache).logits
    assert torch.equal(got[mask.bool()], want[mask.bool()])
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    got, want = (model(ids[:, 60:61], attention_mask=mask, past_key_values=c).logits for c in (cache, clean))
    assert torch.equal(got, want)


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
