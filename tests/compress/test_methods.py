"""What must be true of every method, once, for all of them."""

import json
import re
from dataclasses import replace

import pytest
import torch
from conftest import EVICTING, make_llama
from masked_reference import forward_rows

import kvkeep
from kvkeep.compress.budget.heads import AdaptiveHeads
from kvkeep.compress.budget.layers import distribute
from kvkeep.compress.grouping import Prototypes
from kvkeep.compress.method import Method, Preset
from kvkeep.compress.parse import _convert, parse
from kvkeep.compress.pipeline import PlacedSelection
from kvkeep.compress.presets import METHODS as PRESETS
from kvkeep.compress.presets import MODIFIERS
from kvkeep.compress.scorers.intentkv import IntentKVScorer
from kvkeep.compress.scorers.window import ProtoKVScorer
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.ranking import Units, inverse, ranked
from kvkeep.types import Observation

METHODS = EVICTING


def legal(spec: str) -> bool:
    try:
        parse(spec)
    except BadParameter:
        return False
    return True


SHARING = [f"+{name}" for name in MODIFIERS if name != "recall"]
COMBINED = [s for m in METHODS for c in ["", *SHARING, "+adakv+pyramid"] if legal(s := m + c)]
EVICTING = [spec for spec in COMBINED if spec != "full"]
SELECTING = [spec for spec in EVICTING if not parse(spec).needs_passes]  # without a model


def fits(spec: str, budget: int) -> bool:
    return parse(spec).guard.size(budget) <= budget


def draw(n: int, seed: int = 0, heads: int = 6, kv_heads: int = 2, dim: int = 16):
    torch.manual_seed(seed)
    return torch.randn(heads, n, dim) * 2, torch.randn(kv_heads, n, dim), torch.randn(kv_heads, n, dim)


def choose(spec: str, *given, **how):
    """What `kvkeep.select` says, with an output projection where the method needs one."""
    weight = torch.randn(6, 10, 16, generator=torch.Generator().manual_seed(1))
    return kvkeep.select(spec, *given, output_weight=weight if parse(spec).needs_output else None, **how)


@pytest.mark.parametrize("spec", ["full", *(spec for spec in SELECTING if not spec.endswith("+auto"))])
def test_room_for_everything_keeps_everything(spec):
    for room in (0, 1, 1000):
        assert choose(spec, *draw(61), 61 + room).tolist() == [list(range(61))] * 2, room


@pytest.mark.parametrize("spec", SELECTING)
def test_budget_is_spent_exactly(spec):
    for n, budget in ((300, 48), (201, 101), (61, 60), (40, 8)):
        spends_exactly(spec, n, budget if fits(spec, budget) else 12)


def spends_exactly(spec, n, budget):
    alone = parse(spec).layers.layer_weight  # layers that must be compared cannot be shown one by one
    apart = 1 if alone else 4 if "pyramid" in spec else 2
    less = "threshold" in spec or spec.endswith("+auto")  # what scores too little is evicted though it would fit
    spent = int.__le__ if less else int.__eq__
    totals = []
    for layer in range(apart):
        kept = choose(spec, *draw(n, layer), budget, layer=layer, layers=apart)
        totals.append(sum(kept.lengths))
        assert all(row == sorted(set(row)) and row[0] >= 0 and row[-1] < n for row in kept.tolist() if row)
        if "pyramid" not in spec:
            assert spent(totals[-1], budget * 2), (n, budget, layer)
    assert spent(sum(totals), budget * 2 * apart), (n, budget)


@pytest.mark.parametrize("spec", SELECTING)
def test_a_fraction_is_that_many_tokens(spec):
    """And the same input gives the same choice."""
    drawn = draw(290)
    assert choose(spec, *drawn, 0.1).tolist() == choose(spec, *drawn, 29).tolist()


@pytest.mark.core
@pytest.mark.parametrize("spec", COMBINED)
def test_rows_of_a_padded_batch_are_what_they_are_alone(spec):
    """A prompt and two steps after it; over turns: tests/cache/test_padding.py."""
    model = make_llama(num_hidden_layers=2)
    turns = [[torch.randint(1, 128, (n,)) for n in lengths] for lengths in ((90, 57), (1, 1), (1, 1))]
    together, mask = kvkeep.Cache(model, spec, 24), None
    alone, past = [kvkeep.Cache(model, spec, 24) for _ in range(2)], [None] * 2
    for turn in turns:
        got, mask = forward_rows(model, together, turn, mask)
        for row, cache in enumerate(alone):
            (want,), past[row] = forward_rows(model, cache, [turn[row]], past[row])
            assert got[row][-1].argmax() == want[-1].argmax()
            assert all(together.kept(i)[row] == cache.kept(i)[0] for i in range(2))


@pytest.mark.core
@pytest.mark.parametrize("spec", EVICTING)
def test_memory_is_what_is_kept_and_that_is_the_budget(spec):
    model, budget = make_llama(num_hidden_layers=2), 64
    cache = kvkeep.Cache(model, spec, budget)
    for turn in (300, 79):
        assert model(torch.randint(0, 128, (2, turn)), past_key_values=cache).logits.isfinite().all()
        assert cache.report().kept_per_head <= budget
        if turn == 300:
            for layers in zip(*cache.report().tokens, strict=True):  # of each row
                assert sum(map(sum, layers)) == 2 * 4 * budget and all(sum(layer) > 0 for layer in layers)
            claimed = 2 * 2 * 4 * budget * 2 * 8 * 4  # rows, layers, KV heads, budget, keys and values, dim, float32
            assert abs(cache.nbytes - claimed) <= 0.02 * claimed
        for step in (1, 2):
            model(torch.randint(0, 128, (2, 1)), past_key_values=cache)
            held = cache.report().kept_per_head
            assert held <= budget + step and held <= cache.nbytes / (2 * 2 * 4 * 2 * 8 * 4) <= 1.02 * held


def test_chunkkv_lets_neighbouring_layers_share_a_choice():
    model, ids = make_llama(), torch.randint(0, 128, (1, 200))
    shared, apart = (kvkeep.Cache(model, "chunkkv", 40, reuse=n) for n in (2, 1))
    for cache in (shared, apart):
        model(ids, past_key_values=cache)
    assert shared.kept(0) == shared.kept(1) and shared.kept(2) == shared.kept(3)
    assert apart.kept(0) == shared.kept(0) and apart.kept(0) != apart.kept(1)


@pytest.mark.trap(17)
@pytest.mark.parametrize("piece", [200, 70, 33])
def test_h2o_in_pieces_remembers_every_query(piece):
    """The mass beside each kept token is the attention all queries gave it while it was there."""
    model, ids = make_llama(num_hidden_layers=1), torch.randint(0, 128, (1, 200))
    cache = kvkeep.Cache(model, "h2o", 400)
    for part in ids.split(piece, 1):
        model(part, past_key_values=cache)
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions[0][0]
    expected = weights.sum(1).view(4, 2, -1).mean(1)
    torch.testing.assert_close(cache.backend.store[0].dense(0).token_state[..., 0], expected, atol=1e-4, rtol=0)


def test_the_mass_of_a_long_text_is_summed_in_blocks(monkeypatch):
    """However little may be held at a time, the column sums are the same."""
    from kvkeep.kernels.torch import scoring

    q, k, _ = draw(300)
    where = torch.arange(300).expand(2, -1)
    whole = scoring.column_mass(q, k, where, 300, 0.25)
    monkeypatch.setitem(scoring.BLOCK_PROBS, "cpu", 1)
    torch.testing.assert_close(scoring.column_mass(q, k, where, 300, 0.25), whole, atol=1e-4, rtol=0)
    assert whole.sum().item() == pytest.approx(2 * 300, rel=1e-5)


@pytest.mark.parametrize("boundary, smooth, begins", [("subsequent", 1, 5), ("subsequent", 3, 3), ("first", 1, 0)])
def test_intentkv_begins_the_question_where_attention_moves(boundary, smooth, begins):
    """Rows wander a little among the first keys, from row 6 on they look elsewhere: the row before is the boundary."""
    rows = torch.full((1, 10, 20), 1e-6)
    rows[0, :6, 0], rows[0, 6:, 12] = 0.5, 1.0
    for row in range(6):
        rows[0, row, 1 + row] = 0.5
    rows /= rows.sum(-1, keepdim=True)
    asks = IntentKVScorer(10, smooth, True, boundary).weights(rows)[0]
    assert (asks > 0).tolist() == [row >= begins for row in range(10)]
    assert asks.sum().item() == pytest.approx(1)


def test_intentkv_asks_with_the_whole_window_where_nothing_moves():
    still, short = torch.full((2, 9, 4), 0.25), torch.eye(4)[None]
    for rows, smooth in ((still, 1), (still, 3), (short, 4), (short, 9)):  # of a short one, no two sums of 4 rows
        assert IntentKVScorer(9, smooth, True, "subsequent").weights(rows).eq(1 / rows.shape[1]).all()


def test_parameters_fit_in_the_name():
    queries, keys, values = draw(200)
    named = kvkeep.select("snapkv:window=16:pooling=max+adakv:alpha=0.5", queries, keys, values, 40)
    given = kvkeep.select("snapkv+adakv", queries, keys, values, 40, window=16, pooling="max", alpha=0.5)
    assert named.tolist() == given.tolist()
    assert parse("intentkv:intention=false").parameters["intention"] is False
    assert parse("snapkv:window=16", pool=7).parameters == {"window": 16, "pool": 7, "pooling": "avg"}
    assert parse("snapkv:window=16", window=8).parameters["window"] == 8  # what is said last


def test_what_is_written_at_a_part_is_for_that_part():
    """Old: "cake+prototypes:gamma=0.5" changed CAKE's gamma, and the first of two alphas was both."""
    crossed = parse("cake+prototypes:gamma=0.5")
    assert (crossed.scorer.gamma, crossed.group.gamma) == (200.0, 0.5)
    assert parse("kvkeep:alpha=0.5+adakv:alpha=0.1").heads.alpha == 0.1
    assert parse("kvkeep_lookahead:block=4+blocks").group.size == 16
    both = parse("cake:gamma=5+prototypes", gamma=0.25)  # a keyword is for every part that has it
    assert (both.scorer.gamma, both.group.gamma) == (0.25, 0.25)
    assert both.parameters["gamma"] == 0.25 and "prototypes:gamma" not in both.parameters


ADDED = ["", *(f"+{name}" for name in MODIFIERS), "+prototypes:gamma=0.5:seed=3", "+threshold+auto", "+adakv+pyramid"]


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_recorded_of_a_method_makes_it_again(name):
    """Old: of "cake+prototypes" one gamma was recorded, None, which CAKE refuses: it could not be saved."""
    for method in (parse(spec) for added in ADDED if legal(spec := name + added)):
        assert parse(method.name, **json.loads(json.dumps(method.parameters))) == method


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("snapkv:alpha=0.5+adakv", "no parameter 'alpha'; it has window, pool, pooling"),
        ("snapkv:window", "'window' is not name=value"),
        ("snapkv:", "'' is not name=value"),
        ("snapkv:window=16,pool=5", "written with colons: window=16:pool=5"),
        ("snapkv:windw=3", "Did you mean 'window'"),
        ("snapkv:window=many", "window='many': use a whole number"),
        ("full+values", "keeps everything"),
        ("streamingllm+sinks", "orders tokens by age"),
        ("protokv:votes=raw+values", "negative scores cannot be weighted"),
        ("protokv:votes=raw+adakv", "'protokv:votes=raw\\+adakv' cannot work: scores of different heads"),
        ("snapkv+values+adakv+values", "has \\+values more than once"),
        ("protokv:chunks=0", "chunks=0: use a whole number, 1 or more, or None"),
        ("protokv:chunks=many", "chunks='many': use a whole number, or None"),
        ("protokv:buckets=5", "buckets=5: bits=2 gives 4; use 1 to 4, or more bits"),
        ("snapkv+prototypes:worth=loud", "worth='loud': use 'mean' or 'sum'"),
        ("snapkv+values:power=0", "power=0"),
        ("intentkv:boundary=last", "boundary='last': use 'first' or 'subsequent'"),
        ("ahakv:gain=add", "gain='add': use 'replace' or 'multiply'"),
    ],
)
def test_names_that_make_no_sense(spec, says):
    with pytest.raises(BadParameter, match=says):
        parse(spec)


@pytest.mark.parametrize(
    ("name", "part", "key"),
    [
        (name, part, key)
        for name, part in [*PRESETS.items(), *((f"protokv+{name}", part) for name, part in MODIFIERS.items())]
        for key, default in part.defaults.items()
        if default is None
    ],
)
def test_a_parameter_that_is_none_by_default_has_a_type_too(name, part, key):
    """Old: TypeError, from wherever it was first compared to a number."""
    wrong = ["x", True, [1]] + ([] if "float" in part.build.__annotations__[key] else [1.5])
    for value in wrong:
        with pytest.raises(BadParameter, match=re.escape(f"{key}={value!r}: use ") + ".*, or None"):
            parse(name, **{key: value})
    assert parse(name, **{key: None}) == parse(name)


def test_a_builder_that_does_not_say_what_may_be_instead_of_none():
    """Another package's: it checks by itself."""

    def build(near=None, either: int | str | None = None): ...

    def checked_only(near: "Unknown | None" = None): ...  # noqa: F821

    for part, key in ((build, "near"), (build, "either"), (checked_only, "near")):
        assert _convert(Preset(part, "", ""), key, "x") == "x"


def test_raw_logits_are_not_shared_among_heads_by_hand_either():
    with pytest.raises(BadParameter, match="'mine' cannot work: scores of different heads are not on one scale"):
        Method("mine", ProtoKVScorer(votes="raw"), heads=AdaptiveHeads())
    assert Method("mine", ProtoKVScorer(votes="softmax"), heads=AdaptiveHeads()).heads.alpha == 0.2


def test_heads_share_a_budget_by_what_units_are_worth():
    """Two blocks a head: 3 + 3 and nothing against 5 and 1 + 1. Tokens say one each; the best block is head 0's."""
    scores = torch.tensor([[3.0, 3.0, 0.0, 0.0], [5.0, 0.0, 1.0, 1.0]])
    forced, units = torch.zeros(2, 4, dtype=torch.bool), torch.arange(4).expand(2, -1) // 2
    blocks = Units.summed(units, scores, 2)
    assert AdaptiveHeads(0.0)(scores, forced, [4, 4], 1) == [1, 1]
    assert AdaptiveHeads(0.0)(scores, forced, [4, 4], 1, blocks) == [2, 0]
    assert AdaptiveHeads(0.5)(scores, forced, [4, 4], 2, blocks) == [2, 2]  # one of each head is sure
    assert AdaptiveHeads(0.0)(scores, forced, [4, 4], 2, blocks) == [2, 2]


@pytest.mark.parametrize("spec", ["snapkv+blocks+adakv", "kvkeep", "protokv:votes=softmax+adakv", "intentkv+adakv"])
def test_a_head_with_more_keeps_a_prefix_of_its_own_order(spec):
    """What a head keeps of its quota is what it would keep had every head that quota."""
    drawn, method = draw(300), parse(spec)
    kept = choose(spec, *drawn, 60)
    assert len(set(kept.lengths)) > 1 and sum(kept.lengths) == 120
    for head, quota in enumerate(kept.lengths):
        alike = replace(method, heads=lambda *_, quota=quota: [quota] * 2)
        assert kvkeep.select(alike, *drawn, 60).tolist()[head] == kept.tolist()[head]


@pytest.mark.parametrize(("n", "chunks"), [(2000, None), (1000, None), (999, 500), (700, 500), (10, 3), (5, None)])
def test_ranges_of_prototypes_are_even_and_follow_the_text(n, chunks):
    _, keys, values = draw(n)
    seen = Observation(keys[:, :0], keys, values, torch.arange(n).expand(2, -1), (n, n), n, n, 1.0)
    sizes = Prototypes(chunks=chunks, kind="chunks")._ranges(seen)[0].bincount()
    assert len(sizes) == (chunks or max(1, n // 16)) and sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("count", [1, 3, 4])
def test_anchors_fall_into_as_many_buckets_as_asked(count):
    _, keys, values = draw(400)
    seen = Observation(keys[:, :0], keys, values, torch.arange(400).expand(2, -1), (400, 400), 400, 400, 1.0)
    member = Prototypes(anchors=100, buckets=count).members(seen)
    assert member[member < count].unique().tolist() == list(range(count)) and int(member.max()) < count + 25


def test_clusters_crossed_in_have_all_their_parameters():
    group = parse("snapkv+prototypes:chunks=9:buckets=2:worth=sum:prototypes=chunks:anchors=7").group
    assert group == Prototypes(anchors=7, chunks=9, kind="chunks", buckets=2, worth="sum")


def test_clusters_put_away_are_clusters():
    """A pack of 128 tokens made 100 clusters of one when there were always 500 ranges."""
    chunking = parse("protokv+recall").retrieval.chunking
    member = chunking.members(draw(128)[1], None, 512)
    assert len(member.unique()) <= 4 + 8 and member.max() > 3


def test_padding_comes_after_every_unit_however_many_there_are():
    scores = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, float("-inf")]])
    real, none = scores > float("-inf"), torch.zeros(2, 3, dtype=torch.bool)
    units = Units(torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[9.0, 1.0, 2.0] + [5.0] * 9] * 2))
    kept = PlacedSelection.of_quota(inverse(ranked(scores, none, real, units)), [2, 2])
    assert kept.known().tolist() == [[0, 2], [0, 1]]


@pytest.mark.parametrize("spec", SELECTING)
def test_a_method_says_whether_the_question_decides(spec):
    """Other queries at the end: another choice where a method is query-aware, the same where no query counts."""
    method, alone = parse(spec), parse(spec.partition("+")[0])
    if method.query_aware and not alone.query_aware:
        assert method.layers.layer_weight  # the window shares out among layers, which one layer alone cannot show
        return
    queries, keys, values = draw(300)
    asked = [choose(spec, torch.cat([queries[:, :-8], end], 1), keys, values, 64).tolist()
             for end in (queries[:, -8:], queries[:, -8:].flip(0) * -1)]  # fmt: skip
    if not (method.memory or method.summary) or method.query_aware:
        assert (asked[0] != asked[1]) == method.query_aware


def test_where_every_query_counts_or_nothing_is_dropped_the_question_does_not_decide():
    aware = {name for name, method in kvkeep.methods.items() if method.query_aware}
    assert aware == {"kvkeep", "intentkv", "intelllm", "ahakv", "protokv", "tova", "snapkv", "pyramidkv", "chunkkv",
                     "nacl", "cake", "lookahead", "kvkeep_lookahead", "rkv"}  # fmt: skip
    assert not parse("protokv+recall").query_aware and parse("snapkv+adakv").query_aware


def test_layers_without_weight_share_what_the_others_leave():
    assert distribute([0.0, 0.0, 0.0], 6, 10) == [2, 2, 2]
    assert distribute([1.0, 0.0, 0.0], 14, 10) == [10, 2, 2]
    assert distribute([3.0, 1.0], 8, 10) == [6, 2]
    assert distribute([3.0, 1.0], 8, 5) == [5, 3]
