"""Models that were used are still theirs: copied, pickled, with a twin, or with their weights elsewhere."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import make_llama
from masked_reference import prefilled
from transformers import LlamaForCausalLM

import kvkeep
from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.model.hf_cache import single_device

IDS = torch.randint(1, 128, (1, 90), generator=torch.Generator().manual_seed(5))
RUN = """
import pickle, sys, torch
model = pickle.load(open(sys.argv[1], "rb"))
model(torch.arange(1, 9)[None])
assert not [name for name in sys.modules if name.startswith("kvkeep")]
"""


def used(**how):
    model = make_llama(**how)
    cache = kvkeep.Cache(model, "snapkv", 40)
    model(IDS, past_key_values=cache)
    return model, cache


def test_a_used_model_that_was_pickled_runs_without_us(tmp_path):
    model, _ = used()
    (tmp_path / "model").write_bytes(pickle.dumps(model))
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "model")], check=True)


def test_a_copy_of_a_used_model_is_stock_and_can_be_used(tmp_path):
    model, _ = used()
    twin = copy.deepcopy(model)
    assert twin.config._attn_implementation == "sdpa" != model.config._attn_implementation
    ask = [each(IDS, past_key_values=kvkeep.Cache(each, "snapkv", 40)).logits for each in (model, twin)]
    assert torch.equal(*ask)
    model.save_pretrained(tmp_path)
    assert "kvkeep" not in (tmp_path / "config.json").read_text()


def test_a_cache_serves_one_of_two_models_that_share_a_config():
    model, cache = used()
    other = LlamaForCausalLM(model.config).eval()
    assert other.config is model.config
    with pytest.raises(CacheMisuse, match="made for another LlamaForCausalLM"):
        other(IDS[:, :5], past_key_values=cache)
    again = used()[1]
    assert torch.equal(model(IDS, past_key_values=cache).logits, again.model(IDS, past_key_values=again).logits)
    other(IDS, past_key_values=kvkeep.Cache(other, "snapkv", 40))


def test_a_model_without_weights_is_named():
    with torch.device("meta"):
        model = make_llama()
    with pytest.raises(UnsupportedModel, match="on the meta device"):
        kvkeep.Cache(model, "snapkv", 40)


def to_cpu(model, tmp_path):
    accelerate.cpu_offload(model, torch.device("cpu"))


def with_buffers(model, tmp_path):
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)


def to_disk(model, tmp_path):
    accelerate.disk_offload(model, str(tmp_path / "weights"), torch.device("cpu"))


def some(model, tmp_path):
    where = {"model.embed_tokens": "cpu", "lm_head": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    where |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(model.config.num_hidden_layers)}
    accelerate.dispatch_model(model, where, main_device="cpu", offload_dir=str(tmp_path / "some"))


accelerate = importlib.import_module("accelerate") if importlib.util.find_spec("accelerate") else None
OFFLOADS = [to_cpu, with_buffers, to_disk, some]


def offloaded(how, tmp_path, **changes):
    model = make_llama(**changes)
    how(model, tmp_path)
    return model


@pytest.mark.skipif(accelerate is None, reason="needs kvkeep[harness]")
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("how", OFFLOADS)
def test_offloaded_weights_change_nothing(how, tie, tmp_path):
    plain, away = make_llama(tie_word_embeddings=tie), offloaded(how, tmp_path, tie_word_embeddings=tie)
    for method in ("snapkv", "streamingllm", "infllm"):
        caches = [kvkeep.Cache(model, method, 64) for model in (plain, away)]
        for ids in (IDS, IDS[:, :1]):
            want, got = (cache.model(ids, past_key_values=cache).logits for cache in caches)
            torch.testing.assert_close(got, want)
        if method != "infllm":
            caches[1].save(tmp_path / method)
            for model in (plain, away):
                loaded = kvkeep.Cache.load(tmp_path / method, model)
                torch.testing.assert_close(
                    model(IDS[:, :1], past_key_values=loaded.fork()).logits,
                    away(IDS[:, :1], past_key_values=caches[1].fork()).logits,
                )


@pytest.mark.skipif(accelerate is None, reason="needs kvkeep[harness]")
@pytest.mark.parametrize("how", OFFLOADS)
def test_only_a_model_on_one_device_is_captured_in_a_graph(how, tmp_path):
    assert single_device(make_llama()) == torch.device("cpu")
    assert single_device(offloaded(how, tmp_path)) is None


@pytest.mark.skipif(accelerate is None, reason="needs kvkeep[harness]")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", OFFLOADS)
def test_an_engine_answers_with_offloaded_weights(how, fused, tmp_path, monkeypatch):
    """fused: operations that read weights by themselves, as on a GPU; they leave alone what is elsewhere."""
    import tiny_chat

    monkeypatch.setattr("kvkeep.model.fused.is_faster", lambda model: fused)
    model, tokenizer = tiny_chat.sharp()
    twin = copy.deepcopy(model)
    how(twin, tmp_path)
    prompts = ["abcdefgh. " * 30 + "what?", "abc"]
    for method in ("snapkv", "streamingllm", "infllm"):
        engines = [kvkeep.Engine(each, tokenizer, method, 128) for each in (model, twin)]
        want, got = (engine.generate(prompts[0], max_new_tokens=4) for engine in engines)
        assert got == want
    want, got = (
        kvkeep.Engine(each, tokenizer, "snapkv", 128).generate(prompts, max_new_tokens=4) for each in (model, twin)
    )
    assert got == want
    engines, sampled = [kvkeep.Engine(each, tokenizer, "kvkeep", 128) for each in (model, twin)], {"temperature": 0.8}
    streams = [engine.stream(prompts[0], seed=1, max_new_tokens=4, **sampled) for engine in engines]
    assert [*streams[0]] == [*streams[1]]


@pytest.mark.core
def test_saved_model_does_not_mention_us(model, tmp_path):
    """save_pretrained after our use writes a config that loads where kvkeep is not installed."""
    prefilled(model)
    model.save_pretrained(tmp_path)
    assert "kvkeep" not in (tmp_path / "config.json").read_text()
