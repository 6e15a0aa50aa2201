"""Every public call with wrong types and values for every argument: it works, or raises an error of kvkeep.errors."""

import math
import reprlib
import warnings
from collections.abc import Iterator

import pytest
import tiny_chat
import torch

import kvkeep
from kvkeep.compress.catalogue import METHODS
from kvkeep.engine.driver import Handle
from kvkeep.errors import CacheMisuse, KvkeepError

WRONG = [
    None, True, -1, 2**70, 1.5, math.nan, "", "x", b"x", [], ["x"], [-1], {"x": 5}, object(), lambda *_: None,
    torch.tensor(5), torch.tensor([[1, 2]]), torch.tensor([3, 10**6]),
]  # fmt: skip
TEXT = "A text of some words. " * 3
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.sharp()


@pytest.fixture(scope="module")
def calls(chat, tmp_path_factory):
    """Every public callable by name, with arguments that work; `path` and `id` are such as exist."""
    model, tokenizer = chat
    folder = tmp_path_factory.mktemp("wrong")
    engine = kvkeep.Engine(model, tokenizer, "snapkv", 32, prefix_cache=10**6)
    fresh = kvkeep.Cache(model, "snapkv", 32)
    context = engine.read(TEXT)
    context.save(folder / "context")
    context.sequence.cache.save(folder / "cache")
    queries, keys = torch.randn(4, 40, 8), torch.randn(2, 40, 8)
    how = {"max_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": "x", "logprobs": 2}
    asked = {**how, "progress": None}
    kept = {"method": "snapkv", "budget": 32}
    cache = {**kept, "schedule": "prompt", "host_limit": 10**6, "disk": folder, "storage": None, "window": 16}

    def prefilled() -> kvkeep.Engine:
        return kvkeep.Engine(model, tokenizer, "snapkv", 32)

    return {
        "Cache": (kvkeep.Cache, {"model": model, "tokenizer": tokenizer, **cache}),
        "Cache.load": (kvkeep.Cache.load, {"path": folder / "cache", "model": model, "tokenizer": tokenizer}),
        "Cache.kept": (context.sequence.cache.kept, {"layer": 0}),
        "Cache.show": (context.sequence.cache.show, {"tokenizer": tokenizer, "ids": [5, 6, 7], "row": 0}),
        "Cache.show, empty": (fresh.show, {"tokenizer": tokenizer, "ids": [5, 6, 7], "row": 0}),
        "Cache.save": (context.sequence.cache.save, {"path": folder / "again"}),
        "Cache.crop": (context.sequence.cache.fork().crop, {"tokens_to_remove": -1}),
        "Cache.longest_head": (lambda: fresh.longest_head, {}),
        "Engine": (kvkeep.Engine, {
            "model": model, "tokenizer": tokenizer, "prefill_chunk_size": 8, "max_rows": 2, "max_tokens": 1000,
            "memory": 10**7, "max_waiting": 2, "target_itl": 0.1, "prefix_cache": 10**6, "weights": None, **cache,
        }),
        "Engine, auto": (kvkeep.Engine, {
            "model": model, "tokenizer": tokenizer, "budget": "auto", "max_budget": 0.5, "coverage": 0.9,
        }),
        "Engine.generate": (engine.generate, {"prompt": TEXT, "question": "What?", **asked}),
        "Engine.generate, many": (engine.generate, {"prompt": [TEXT, "Two"], "question": "What?", "rows": 2, **how}),
        "Engine.stream": (engine.stream, {"prompt": TEXT, "question": "What?", **asked}),
        "Engine.chat": (engine.chat, {"messages": CHAT, **asked}),
        "Engine.submit": (engine.submit, {
            "prompt": TEXT, "question": "What?", "owner": "me", "client": "a", "cache_prefix": True, **kept, **asked,
        }),
        "Engine.submit, chat": (engine.submit, {"prompt": CHAT, "tools": None, **how}),
        "Engine.submit, context": (engine.submit, {"prompt": "What?", "owner": "", "context": engine.pin(TEXT), **how}),
        "Engine.read": (engine.read, {"text": TEXT, "question": "What?", "progress": None, **kept}),
        "Engine.pin": (engine.pin, {"text": TEXT, "owner": "", "public": False, "progress": None, **kept}),
        "Engine.unpin": (engine.unpin, {"id": "x", "owner": ""}),
        "Engine.warmup": (engine.warmup, {"rows": 1, "progress": lambda _: None}),
        "Engine.load_context": (engine.load_context, {"path": folder / "context"}),
        "Engine.prefill": (lambda **given: prefilled().prefill(**given), {"ids": [5, 6, 7], "progress": None}),
        "Engine.extend": (lambda **given: prefilled().extend(**given), {"ids": torch.tensor([5, 6, 7]), "keep": 1}),
        "Engine.encode": (engine.encode, {"prompt": TEXT, "question": "What?"}),
        "Engine.length": (engine.length, {"prompt": TEXT, "question": "What?"}),
        "Context.ask": (context.ask, {"question": "What?", **asked}),
        "Context.stream": (context.stream, {"question": "What?", **asked}),
        "Context.submit": (context.submit, {"question": "What?", **asked}),
        "Context.save": (context.save, {"path": folder / "once more"}),
        "select": (kvkeep.select, {
            "queries": queries, "keys": keys, "values": keys, "scale": 1.0, "layer": 0, "layers": 1, "window": 4,
            "frequencies": torch.ones(4), "output_weight": torch.randn(4, 6, 8), "method": "snapkv", "budget": 16,
        }),
        "load": (kvkeep.load, {
            "name": "/nowhere", "device": "cpu", "dtype": "auto", "progress": None, "tp_plan": None,
        }),
        "methods": (kvkeep.methods.__getitem__, {"name": "snapkv"}),
        "methods.get": (kvkeep.methods.get, {"name": "snapkv", "default": None}),
        "Guard": (kvkeep.Guard, {"sinks": 4, "recent": 4, "window": 4, "shrink_to_fit": False}),
        "Method": (kvkeep.Method, {
            name: getattr(kvkeep.methods["snapkv"], name) for name in kvkeep.Method.__dataclass_fields__
        }),
        "register_method": (kvkeep.register_method, {"name": "mine", "paper": "", "keeps": "", "deviates": ""}),
        "register_method, function": (kvkeep.register_method("mine"), {"build": lambda: kvkeep.methods["snapkv"]}),
        "register_task": (kvkeep.register_task, {"name": "mine", "source": None}),
    }  # fmt: skip


def outcome(function, given) -> str:
    """What a call raises that is no error of kvkeep; empty: it works, or is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**given)
            if isinstance(result, Handle | Iterator):
                list(result)
    except KvkeepError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        METHODS.pop("mine", None)
    return ""


GROUPS = ["Cache", "Context", "Engine", "Guard", "Method", "load", "methods", "register", "select"]


@pytest.mark.parametrize("group", GROUPS)
def test_wrong_arguments_are_refused_with_an_error_of_kvkeep(calls, group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some are paths
    monkeypatch.setattr("kvkeep.model.load._source", lambda *_: str(tmp_path))  # some are names on the hub
    assert all(name.startswith(tuple(GROUPS)) for name in calls)
    raw = []
    for name, (function, given) in calls.items():
        if name.startswith(group):
            tried = [given, *({**given, key: value} for key in given for value in WRONG)]
            found = [(each, outcome(function, each)) for each in tried]
            raw += [f"{name}({reprlib.repr(each)}): {error}" for each, error in found if error]
    assert not raw, "\n".join(raw)


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("Engine.prefill", {"ids": ["x"]}, r"ids=\['x'\]: give token ids"),
        ("Engine.prefill", {"ids": torch.randn(3)}, r"ids has shape \[3\] of torch.float32; give a list of token ids"),
        ("Engine.prefill", {"ids": [[1, 2]]}, r"ids has shape \[1, 2\]"),
        ("Engine.prefill", {"ids": []}, r"ids has shape \[0\]"),
        ("Engine.extend", {"ids": [3, 999]}, "ids: token ids are 3 to 999; this model's are 0 to 257"),
        ("Engine.extend", {"keep": -1}, "keep=-1: use a whole number, 0 or more"),
        ("Cache", {"host_limit": "x"}, "host_limit='x': use a whole number, 0 or more"),
        ("Cache", {"host_limit": -1}, "host_limit=-1: use a whole number, 0 or more"),
        ("Cache", {"schedule": []}, r"schedule=\[\]: use 'prompt' or 'step' or 'buffer', or a whole number, 1 or more"),
        ("Cache", {"disk": 5}, "disk=5: use a text, or a path"),
        ("Engine.generate", {"progress": 5}, "progress=5: use a function, or True or False, or None"),
        ("Engine.submit, chat", {"tools": 5}, "tools=5: give a list of JSON schemas"),
        ("Engine.submit, chat", {"prompt": [{"content": "a"}]}, "role of message 0=None is a NoneType; give a text"),
        ("Engine.submit", {"owner": []}, r"owner=\[\]: use a text"),  # the thread that answers died of it
        ("Engine.load_context", {"path": 5}, "path=5: use a text, or a path"),
        ("Cache.load", {"path": None}, "path=None: use a text, or a path"),
        ("Cache.show, empty", {"row": 0}, "row=0: this cache has 0 rows, counted from 0; show it after a forward pass"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_the_way_out(calls, name, wrong, says):
    function, given = calls[name]
    with pytest.raises(KvkeepError, match=says):
        function(**{**given, **wrong})


def test_ids_that_do_not_go_on_are_refused(chat):
    engine = kvkeep.Engine(*chat, "snapkv", 32)
    engine.prefill([5, 6, 7])
    for ids in ([5, 6, 7], [5], [6, 6, 7, 8]):
        with pytest.raises(CacheMisuse, match="do not go on after the 3 tokens that the cache holds"):
            engine.prefill(ids)
    engine.prefill([5, 6, 7, 8])
    assert engine.token_ids == [5, 6, 7, 8]
