"""Every method with every modifier, in every state a cache can be in while it decodes."""

from dataclasses import fields, is_dataclass
from operator import le

import pytest
import torch
from conftest import make_llama

import kvkeep
from kvkeep.compress.budget.heads import Threshold
from kvkeep.compress.parse import parse
from kvkeep.compress.presets import METHODS, MODIFIERS
from kvkeep.errors import BadParameter

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(3))[None]
PROMPT, STEPS, LAYERS, HEADS = 60, 8, 2, 4
STATES = {"room": (120, None), "full": (32, None), "buffer": (32, 5)}  # budget, schedule


def is_legal(spec):
    """Whatever else goes wrong while a method is made is an error of every test here."""
    try:
        return bool(parse(spec))
    except BadParameter:
        return False


PAIRS = [(name, modifier) for name in METHODS for modifier in MODIFIERS]
MODIFIED = [*METHODS, *(f"{name}+{modifier}" for name, modifier in PAIRS)]
LEGAL = [spec for spec in MODIFIED if is_legal(spec)]


def make_cache(model, spec, budget, schedule=None):
    cache = kvkeep.Cache(model, spec, budget, schedule=schedule)
    if cache.method.retrieval and cache.method.retrieval.needs:
        cache.backend.set_token_marks(0, (torch.arange(IDS.shape[1]) % 7 == 6).float())
    return cache


def passes():
    yield IDS[:, :PROMPT]
    yield from IDS[:, PROMPT : PROMPT + STEPS].split(1, 1)


def held_after(method, budget, step):
    """Tokens per KV head, on average, after so many decode steps over a full cache."""
    every = method.schedule.every
    return budget + (step if every is None else step % every)


def shares_move(method):
    """Layers are weighed anew at every step: one that gets a larger share has nothing left to fill it with."""
    return method.layers.layer_weight and method.schedule.every == 1


def may_keep_less(method):
    return isinstance(method.heads, Threshold) or method.coverage is not None


def decoded():
    """Every combination where it evicts: by its own schedule, and from a buffer, which begins as one without a schedule
    does. With room for all, those that note something of tokens or layers meanwhile, and every method by itself."""
    for spec in LEGAL:
        method = parse(spec)
        alone = "+" not in spec
        if alone or method.schedule.every or method.retrieval:
            yield spec, "full"
        if not method.retrieval:
            yield spec, "buffer"
        if alone or method.memory or method.layers.layer_weight or method.coverage is not None:
            yield spec, "room"


@pytest.mark.core
@pytest.mark.parametrize("spec, state", [*decoded()])
def test_every_combination_decodes(spec, state):
    model = make_llama(num_hidden_layers=LAYERS)
    budget, schedule = STATES[state]
    cache = make_cache(model, spec, budget, schedule)
    logits, held = [], []
    for ids in passes():
        logits.append(model(ids, past_key_values=cache).logits)
        held.append(cache.report().kept_per_head)
    assert all(each.isfinite().all() for each in logits) and cache.get_seq_length() == PROMPT + STEPS
    covers = cache.method.coverage is not None  # evicts what scores too little though there is room
    if state == "room" and covers:
        assert held == [held[0] + step for step in range(STEPS + 1)] and held[0] <= PROMPT
    elif state == "room" or spec == "full":
        assert held == [PROMPT + step for step in range(STEPS + 1)]
        want = model(IDS[:, : PROMPT + STEPS]).logits
        torch.testing.assert_close(torch.cat(logits, 1), want, atol=1e-4, rtol=0)
    elif cache.method.retrieval:
        assert max(held) <= budget
    else:
        want = [held_after(cache.method, budget, step) for step in range(STEPS + 1)]
        if may_keep_less(cache.method):
            assert all(map(le, held, want))
            return
        assert held == want or (shares_move(cache.method) and all(map(le, held, want)) and held[0] == want[0])


REMEMBERING = [spec for spec in LEGAL if parse(spec).memory]


@pytest.mark.parametrize(
    "budget, spec",
    [*((64, spec) for spec in REMEMBERING), *((32, spec) for spec in REMEMBERING if spec in METHODS)],
)
def test_a_quick_step_remembers_what_a_slow_one_does(spec, budget, monkeypatch):
    """The same notes, hence the same choice, whether a step appends and goes on or every token competes."""
    model = make_llama(num_hidden_layers=LAYERS).double()
    quick, slow = (make_cache(model, spec, budget, 5) for _ in range(2))
    monkeypatch.setattr(slow.backend.steps, "is_possible", lambda: False)
    for ids in passes():
        got, want = (model(ids, past_key_values=cache).logits for cache in (quick, slow))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert [quick.kept(i) for i in range(LAYERS)] == [slow.kept(i) for i in range(LAYERS)]
    for index in range(LAYERS):
        notes = [cache.backend.store[index].dense(0).token_state for cache in (quick, slow)]
        torch.testing.assert_close(*notes, atol=1e-5, rtol=1e-5)


def test_what_is_refused_is_refused_by_name():
    """Nothing but BadParameter says no, and every eviction method takes most modifiers."""
    assert len(LEGAL) < len(MODIFIED)
    for spec in set(MODIFIED) - set(LEGAL):
        with pytest.raises(BadParameter, match="cannot (work|be weighted)"):
            parse(spec)
    for name in METHODS:
        legal = [f"{name}+{modifier}" in LEGAL for modifier in MODIFIERS]
        assert sum(legal) >= 5 if parse(name).scorer else not any(legal)


@pytest.mark.parametrize("name", METHODS)
def test_two_modifiers_are_made_or_refused(name):
    for first in MODIFIERS:
        for second in MODIFIERS:
            is_legal(f"{name}+{first}+{second}")


def test_a_memory_that_knows_no_steps():
    """It need not: every token then competes the general way."""

    class Count:
        width, sees_all = 1, True

        def __call__(self, seen, budget):
            return seen.token_state + seen.new

    model = make_llama(num_hidden_layers=LAYERS)
    scorer, every_step = (lambda seen, budget: seen.token_state[..., 0]), parse("h2o").schedule
    method = kvkeep.Method("count", scorer, memory=Count(), schedule=every_step)
    for budget in (120, 32):
        cache = kvkeep.Cache(model, method, budget)
        for ids in passes():
            model(ids, past_key_values=cache)
        assert cache.report().kept_per_head == min(budget, PROMPT + STEPS)


WORDS = {
    "pooling": "max", "boundary": "subsequent", "mode": "local", "gain": "multiply", "votes": "raw", "worth": "sum",
    "prototypes": "lsh", "probe": "mean",
}  # fmt: skip
ASKED = [(name, asked) for name, named in METHODS.items() for asked in named.defaults]
ASKED += [(f"protokv+{name}", asked) for name in ("recall",) for asked in MODIFIERS[name].defaults]


def another(name, value):
    """A value that nobody has by default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return WORDS[name]
    if isinstance(value, float) or name == "gamma":
        return 0.375
    return {"buckets": 3, "norm": int(value != 1)}.get(name, 11)


def parts(value):
    """All that a method is made of, by where it is."""
    if not is_dataclass(value):
        return {"": value}
    inner = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in ("name", "parameters")}
    return {f"{name}.{deeper}": leaf for name, part in inner.items() for deeper, leaf in parts(part).items()}


@pytest.mark.parametrize(("spec", "asked"), ASKED)
def test_what_is_asked_for_reaches_a_part(spec, asked):
    usual = parse(spec)
    default = usual.parameters[asked]
    given = another(asked, default)
    before, after = parts(usual), parts(parse(spec, **{asked: given}))
    changed = {after[where] for where in before.keys() & after.keys() if before[where] != after[where]}
    assert given in changed or (isinstance(given, bool | str) and changed)
    assert parts(parse(spec, **{asked: default})) == before


def test_clusters_that_are_fetched_stand_where_they_stood():
    recall = parse("protokv+recall").retrieval
    assert (recall.window, recall.far_positions, recall.default_sizes) == (None, "original", (4, 32))
