"""Saved caches: written whole or not at all, and nothing that could not have been a cache is taken for one."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from contextlib import suppress

import pytest
import torch
from conftest import make_llama
from masked_reference import HARD, LENGTHS, build, kept, logits, padded, prefilled, tokens
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

import kvkeep
from kvkeep.cache.serialize import describe
from kvkeep.cache.validate import check
from kvkeep.errors import BadCacheFile, KvkeepError
from kvkeep.storage import checkpoint

IDS = torch.randint(1, 128, (2, 80), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS).index_fill_(1, torch.arange(9), 0)
MASK[0] = 1


def sliding():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, vocab_size=128, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=16, attn_implementation="eager")
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).eval()


KINDS = {
    "snapkv+adakv": (make_llama, {"schedule": 16}),
    "streamingllm": (make_llama, {}),
    "kvkeep": (make_llama, {"storage": "int8"}),
    "tova": (sliding, {}),
}


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """A model and a padded, decoded, saved cache of it."""
    make, how = KINDS[request.param]
    with torch.no_grad():
        model = make()
        cache = kvkeep.Cache(model, request.param, 40, **how)
        model(IDS, attention_mask=MASK, past_key_values=cache)
        model(IDS[:, :1], past_key_values=cache)
    path = tmp_path_factory.mktemp("saved") / "cache"
    cache.save(path)
    return model, path


def rewrite(path, target, facts=None, tensors=None):
    """The same cache with something changed, and every checksum right again."""
    target.mkdir(exist_ok=True)
    save_file(tensors or load_file(path / checkpoint.TENSORS), target / checkpoint.TENSORS)
    facts = copy.deepcopy(facts or json.loads((path / checkpoint.DESCRIPTION).read_text()))
    facts.pop("sha256")
    facts["tensors_sha256"] = hashlib.sha256((target / checkpoint.TENSORS).read_bytes()).hexdigest()
    facts["sha256"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    (target / checkpoint.DESCRIPTION).write_text(json.dumps(facts))
    return target


def leaves(node, way=()):
    """Every place in the description, the containers included."""
    yield way
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from leaves(node[key], (*way, key))


def changed(facts, way, value):
    facts = copy.deepcopy(facts)
    *front, last = way
    place = facts
    for key in front:
        place = place[key]
    place[last] = value
    return facts


BAD = [float("nan"), 2.5, "7", None, [], {}, [[]], True]
FREE = ("model_class", "format", "sha256", "tensors_sha256")


@pytest.mark.slow
def test_an_edited_description_is_refused_or_goes_on(saved, tmp_path):
    model, path = saved
    facts = json.loads((path / checkpoint.DESCRIPTION).read_text())
    ways = [way for way in leaves(facts) if way and way[0] not in FREE and not {"1", "2", "3"} & set(way[1:2])]
    ways = [way for way in ways if type(way[-1]) is str or way[-1] == 0]
    refused = 0
    for number, way in enumerate(ways):
        for value in (-1, 10**12, BAD[number % len(BAD)], BAD[(number + 3) % len(BAD)]):
            if (edited := changed(facts, way, value)) == facts:
                continue
            target = rewrite(path, tmp_path / "edited", edited)
            try:
                loaded = kvkeep.Cache.load(target, model)
            except BadCacheFile:
                refused += 1
                continue
            assert way[0] in ("budget", "parameters", "peak_bytes", "schedule", "storage"), (way, value)
            with suppress(KvkeepError):  # a window larger than the text, say
                model(IDS[:, :5], past_key_values=loaded)
    assert refused > 2 * len(ways)


def strange_tensors(tensors):
    """Every tensor gone, of another shape or of another kind, and some too many."""
    for name, t in tensors.items():
        if ".1." in name:
            continue
        yield f"{name} gone", {k: v for k, v in tensors.items() if k != name}
        yield f"{name} short", tensors | {name: t[:-1].contiguous()}
        yield f"{name} flat", tensors | {name: t.flatten()[None].contiguous()}
        yield f"{name} other", tensors | {name: t.to(torch.float64)}
        yield f"{name} bytes", tensors | {name: t.to(torch.int16)}
    extra = torch.zeros(3)
    for name in (
        "x",
        "layer",
        "layer.99.keys",
        "layer.a.keys",
        "queries.0.9",
        "queries.0",
        "hf_layer.0.keys",
        "layer.0.rows",
    ):
        yield f"{name} too many", tensors | {name: extra}


@pytest.mark.slow
def test_edited_tensors_are_refused(saved, tmp_path):
    model, path = saved
    for what, tensors in strange_tensors(load_file(path / checkpoint.TENSORS)):
        with pytest.raises(BadCacheFile):
            kvkeep.Cache.load(rewrite(path, tmp_path / "edited", tensors=tensors), model)
            pytest.fail(what)


def test_numbers_that_cannot_be_are_refused(tmp_path):
    """Positions that were never read, in no order, or keys that are not numbers; sizes of other heads."""
    model = make_llama()
    cache = kvkeep.Cache(model, "snapkv", 40)
    model(IDS, past_key_values=cache)
    cache.save(tmp_path / "good")
    tensors = load_file(tmp_path / "good" / checkpoint.TENSORS)
    facts = json.loads((tmp_path / "good" / checkpoint.DESCRIPTION).read_text())
    places = tensors["layer.0.token_positions"]
    for name, t in {
        "layer.0.token_positions": [places + 80, places + 1, places - 80, places.flip(0), places * 0],
        "layer.1.keys": [tensors["layer.1.keys"] * float("nan")],
    }.items():
        for bad in t:
            with pytest.raises(BadCacheFile):
                kvkeep.Cache.load(rewrite(tmp_path / "good", tmp_path / "bad", tensors=tensors | {name: bad}), model)
    other = copy.deepcopy(facts)
    for layer in other["layers"].values():
        layer["rows"], layer["kv_heads"] = 4, 2
    other["seen"], other["kept"] = other["seen"] * 2, other["kept"] * 2
    for change in (other, facts | {"parameters": {**facts["parameters"], "disk": str(tmp_path / "spill")}}):
        with pytest.raises(BadCacheFile):
            kvkeep.Cache.load(rewrite(tmp_path / "good", tmp_path / "bad", change), model)
    assert not (tmp_path / "spill").exists()
    same = kvkeep.Cache.load(rewrite(tmp_path / "good", tmp_path / "bad"), model)
    assert torch.equal(model(IDS, past_key_values=same).logits, model(IDS, past_key_values=cache).logits)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"rows": 2.0}, "rows"),  # equal to the number of rows, and no whole number
        ({"rows": 4, "kv_heads": 2}, "rows"),  # as many segments, of other rows
        ({"kv_heads": 0, "starts": [], "lengths": [], "room": []}, "rows"),
        ({"rows": 0}, "rows"),  # heads without rows
        ({"lengths": [0] * 7}, "sizes"),
        ({"room": [1.0] * 8}, "sizes"),
        ({"starts": [0] * 8}, "segments"),
        ({"lengths": [41] * 8}, "segments"),
    ],
)
def test_sizes_of_a_layer_that_cannot_be_are_named(layer, says):
    """Each by itself: what follows would refuse most of them, too, and not all."""
    model, rows = make_llama(), layer.get("rows", 2)
    cache, empty = (kvkeep.Cache(model, "snapkv", 40) for _ in range(2))
    if rows:
        model(IDS, past_key_values=cache)
    tensors, facts = describe(cache)
    facts["layers"]["0"] |= {"kv_heads": 4, **layer}
    with pytest.raises(ValueError, match=f"^{says} of layer 0: invalid"):
        check(empty, tensors, facts)


def test_what_is_not_a_folder_of_two_files_is_refused(tmp_path):
    model = make_llama()
    (tmp_path / "file").write_text("{}")
    for name, text in {
        "folder": None,
        "deep": "[" * 100_000,
        "objects": '{"a":' * 50_000,
        "digits": "9" * 5000,
    }.items():
        (tmp_path / name).mkdir()
        description = tmp_path / name / checkpoint.DESCRIPTION
        description.mkdir() if text is None else description.write_text(text)
    facts = {"format": checkpoint.FORMAT}
    (tmp_path / "less").mkdir()
    facts["sha256"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    (tmp_path / "less" / checkpoint.DESCRIPTION).write_text(json.dumps(facts))
    (tmp_path / "less" / checkpoint.TENSORS).mkdir()
    for path in tmp_path.iterdir():
        with pytest.raises(BadCacheFile):
            kvkeep.Cache.load(path, model)


@pytest.mark.parametrize("method", ["snapkv", "kvkeep", "snapkv+adakv"])
def test_rows_that_were_repeated_are_saved(method, tmp_path):
    """Beams share what they have in common; a file does not."""
    model = make_llama()
    cache = kvkeep.Cache(model, method, 40, schedule="buffer")
    model(IDS, past_key_values=cache)
    model(IDS[:, :1], past_key_values=cache)
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.save(tmp_path / "cache")
    loaded = kvkeep.Cache.load(tmp_path / "cache", model)
    for ids in (IDS[:, :1], IDS[:, :30], IDS[:, :1]):
        assert torch.equal(model(ids, past_key_values=loaded).logits, model(ids, past_key_values=cache).logits)


def caches(model):
    for n in (60, 80):
        cache = kvkeep.Cache(model, "snapkv", 40)
        model(IDS[:, :n], past_key_values=cache)
        yield cache


@pytest.mark.parametrize("exchange", [True, False])
def test_roundabout_ways_and_links_are_followed(tmp_path, monkeypatch, exchange):
    model = make_llama()
    first, second = caches(model)
    if not exchange:
        monkeypatch.setattr(checkpoint, "_exchange", lambda *_: False)
    first.save(tmp_path / "a")
    os.symlink("a", tmp_path / "link")
    os.symlink("new", tmp_path / "dangling")
    for way in ("a/../a", "link", "dangling"):
        second.save(tmp_path / way)
        assert kvkeep.Cache.load(tmp_path / way, model).kept(1) == second.kept(1)
        first.save(tmp_path / "a")
    assert (tmp_path / "link").is_symlink() and sorted(os.listdir(tmp_path)) == ["a", "dangling", "link", "new"]


def test_a_save_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    model = make_llama()
    first, second = caches(model)
    first.save(tmp_path / "a")
    replace = os.replace

    def failing(one, other):
        if os.fspath(other) == os.fspath(tmp_path / "a") and not os.fspath(one).endswith("-old"):
            raise OSError(28, "No space left on device")
        replace(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_exchange", lambda *_: False)
        patch.setattr(os, "replace", failing)
        with pytest.raises(BadCacheFile, match="No space left on device.*untouched"):
            second.save(tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    os.symlink("loop", tmp_path / "loop")
    for way in ("file/a", "file", "loop"):
        with pytest.raises(BadCacheFile):
            second.save(tmp_path / way)
    assert sorted(os.listdir(tmp_path)) == ["a", "file", "loop"] and (tmp_path / "file").read_text() == "mine"
    assert kvkeep.Cache.load(tmp_path / "a", model).kept(1) == first.kept(1)


@pytest.mark.core
@pytest.mark.parametrize("method", [*HARD, "cake:window=7+prototypes"])
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
