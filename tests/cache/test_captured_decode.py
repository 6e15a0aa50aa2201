"""Decode steps that a cache captures in a CUDA graph. Without a GPU the same steps run, without a graph."""

import copy
import pickle
import weakref

import pytest
import torch
from conftest import EVICTING, make_llama

import kvkeep
from kvkeep.cache.decode import captured_decode
from kvkeep.cache.decode.captured_decode import CapturedDecode
from kvkeep.compress.parse import parse
from kvkeep.model.hf_forward import InterceptedForward

IDS = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(5))
METHODS = [name for name in EVICTING if parse(name).schedule.every is None and not parse(name).memory]
STEPPING = ["h2o", "streamingllm", "lm_infinite", "ahakv", "tova"]  # one token leaves for each new one
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def captures(monkeypatch):
    """How many steps were captured."""
    taken, step = [], CapturedDecode.step
    monkeypatch.setattr(captured_decode, "DEVICES", {DEVICE})
    monkeypatch.setattr(CapturedDecode, "step", lambda self, *given: taken.append(self) or step(self, *given))
    return taken


def answer(model, spec, ids, **how):
    cache = kvkeep.Cache(model, spec, 40 if spec != "full" else None)
    how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **how}
    return model.generate(ids.to(model.device), past_key_values=cache, **how), cache


CASES = [(spec, 2) for spec in [*METHODS, "snapkv+adakv", "intelllm+adakv", *STEPPING]]
CASES += [(spec, 1) for spec in ("full", "kvkeep", "snapkv+adakv", "h2o", "streamingllm", "tova")]


@pytest.mark.parametrize("spec, rows", CASES)
def test_the_answer_is_the_one_without_capture(spec, rows, captures, monkeypatch):
    monkeypatch.setattr("kvkeep.cache.cache.ROOM", 8)  # so that it is captured again
    model = make_llama().to(DEVICE)
    with monkeypatch.context() as without:
        without.setattr(captured_decode, "DEVICES", set())
        want, plain = answer(model, spec, IDS[:rows])
    assert not captures
    got, cache = answer(model, spec, IDS[:rows])
    assert torch.equal(got, want) and len(captures) == 21 and len(set(captures)) == 2
    assert cache.report().kept == plain.report().kept and cache.seen == plain.seen
    assert [cache.kept(i) for i in range(2)] == [plain.kept(i) for i in range(2)]
    more = torch.cat([got, IDS[:rows, :20].to(DEVICE)], 1)  # the next turn
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*(model.generate(more, past_key_values=each, **how) for each in (cache, plain)))


@pytest.mark.parametrize("spec", ["snapkv", *STEPPING])
def test_what_was_decoded_in_inference_mode_is_read_outside_of_it(spec, captures):
    model = make_llama().to(DEVICE)
    _, plain = answer(model, spec, IDS[:1])
    with torch.inference_mode():
        _, cache = answer(model, spec, IDS[:1])
    assert captures and [cache.kept(i) for i in range(2)] == [plain.kept(i) for i in range(2)]


def test_what_evicts_or_retrieves_while_decoding_is_not_captured(captures):
    for spec in ("h2o+adakv", "quest", "snapkv"):
        model, storage = make_llama().to(DEVICE), "int8" if spec == "snapkv" else None
        cache = kvkeep.Cache(model, spec, 64, storage=storage)
        model.generate(IDS.to(DEVICE), past_key_values=cache, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert not captures


def test_padded_rows_are_not_captured(captures):
    mask = torch.ones_like(IDS)
    mask[1, :7] = 0
    answer(make_llama().to(DEVICE), "snapkv", IDS, attention_mask=mask.to(DEVICE))
    assert not captures


def test_beam_search_is_not_captured_again_and_again(captures, monkeypatch):
    model = make_llama().to(DEVICE)
    got, _ = answer(model, "snapkv", IDS[:1], num_beams=3)
    assert len(set(captures)) <= 2
    monkeypatch.setattr(captured_decode, "can_capture", lambda cache: False)
    monkeypatch.setattr("kvkeep.cache.cache.can_capture", lambda cache: False)
    assert torch.equal(got, answer(model, "snapkv", IDS[:1], num_beams=3)[0])


def test_a_cache_that_nobody_holds_is_freed(captures):
    model = make_llama().to(DEVICE)
    _, cache = answer(model, "snapkv", IDS[:1])
    gone = weakref.ref(cache._captured), weakref.ref(model)
    del cache, model
    captures.clear()
    assert [each() for each in gone] == [None, None]


def test_a_copy_or_a_pickle_has_its_own_forward(captures):
    model = make_llama().to(DEVICE)
    want, _ = answer(model, "snapkv", IDS[:1])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not isinstance(other.forward, InterceptedForward) and other.forward.__self__ is other
        captures.clear()
        assert torch.equal(answer(other, "snapkv", IDS[:1])[0], want) and captures
        assert isinstance(other.forward, InterceptedForward)
