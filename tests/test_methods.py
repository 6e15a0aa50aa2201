"""What must be true of every method, once, for all of them."""

import pytest
import torch
from conftest import EVICTING, make_llama

import kvkeep
from kvkeep.compress.method import parse
from kvkeep.compress.presets import CROSSINGS
from kvkeep.errors import BadParameter

METHODS = EVICTING


def legal(spec: str) -> bool:
    try:
        parse(spec)
    except BadParameter:
        return False
    return True


SHARING = [f"+{name}" for name in CROSSINGS if name != "recall"]
CROSSED = [s for m in METHODS for c in ["", *SHARING, "+adakv+pyramid"] if legal(s := m + c)]
EVICTING = [spec for spec in CROSSED if spec != "full"]


def fits(spec: str, budget: int) -> bool:
    return parse(spec).guard.size(budget) <= budget


def draw(n: int, seed: int = 0, heads: int = 6, kv_heads: int = 2, dim: int = 16):
    torch.manual_seed(seed)
    return torch.randn(heads, n, dim) * 2, torch.randn(kv_heads, n, dim), torch.randn(kv_heads, n, dim)


@pytest.mark.parametrize("spec", CROSSED)
@pytest.mark.parametrize("room", [0, 1, 1000])
def test_room_for_everything_keeps_everything(spec, room):
    kept = kvkeep.select(spec, *draw(61), 61 + room)
    assert kept.tolist() == [list(range(61))] * 2


@pytest.mark.parametrize("spec", EVICTING)
@pytest.mark.parametrize("n, budget", [(300, 48), (300, 47), (299, 150), (61, 60), (700, 33), (40, 8)])
def test_budget_is_spent_exactly(spec, n, budget):
    budget = budget if fits(spec, budget) else 12
    apart = 1 if parse(spec).layers.weigh else 4  # layers that must be compared cannot be shown one by one
    totals = []
    for layer in range(apart):
        kept = kvkeep.select(spec, *draw(n, layer), budget, layer=layer, layers=apart)
        totals.append(sum(kept.lengths))
        assert all(row == sorted(set(row)) and row[0] >= 0 and row[-1] < n for row in kept.tolist() if row)
        if "pyramid" not in spec:
            assert totals[-1] == budget * 2
    assert sum(totals) == budget * 2 * apart


@pytest.mark.parametrize("spec", EVICTING)
def test_a_cache_spends_its_budget_exactly(spec):
    model = make_llama()
    cache = kvkeep.Cache(model, spec, 40)
    model(torch.randint(0, 128, (1, 200)), past_key_values=cache)
    tokens = [cache.report().tokens[layer][0] for layer in range(4)]
    assert sum(map(sum, tokens)) == 40 * 4 * 4
    assert all(sum(layer) > 0 for layer in tokens)


@pytest.mark.parametrize("spec", EVICTING)
def test_same_input_same_choice(spec):
    first, second = (kvkeep.select(spec, *draw(200), 40).tolist() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("spec", EVICTING)
def test_a_fraction_is_that_many_tokens(spec):
    assert kvkeep.select(spec, *draw(290), 0.1).tolist() == kvkeep.select(spec, *draw(290), 29).tolist()


@pytest.mark.core
@pytest.mark.parametrize("spec", CROSSED)
def test_rows_of_a_padded_batch_are_what_they_are_alone(spec):
    model = make_llama()
    long, short = torch.randint(1, 128, (1, 90)), torch.randint(1, 128, (1, 57))
    padding = torch.ones(2, 90, dtype=torch.long)
    padding[1, :33] = 0
    batch = torch.cat([long, torch.cat([torch.zeros(1, 33, dtype=torch.long), short], 1)])
    together = kvkeep.Cache(model, spec, 24)
    tokens = model.generate(batch, attention_mask=padding, past_key_values=together, max_new_tokens=6, do_sample=False)
    for row, ids in enumerate((long, short)):
        alone = kvkeep.Cache(model, spec, 24)
        expected = model.generate(ids, past_key_values=alone, max_new_tokens=6, do_sample=False)
        assert tokens[row, -6:].tolist() == expected[0, -6:].tolist()
        assert all(together.kept(i)[row] == alone.kept(i)[0] for i in range(4))


@pytest.mark.core
@pytest.mark.parametrize("spec", EVICTING)
def test_every_turn_ends_its_prefill_within_budget(spec):
    model, budget = make_llama(), 32
    cache = kvkeep.Cache(model, spec, budget)
    for turn in range(4):
        ids = torch.randint(0, 128, (1, 70 + 9 * turn))
        logits = model(ids, past_key_values=cache).logits
        assert logits.isfinite().all()
        assert cache.report().kept_per_head <= budget
        for _ in range(3):
            model(torch.randint(0, 128, (1, 1)), past_key_values=cache)
        assert cache.report().kept_per_head <= budget + 3


@pytest.mark.parametrize("spec", EVICTING)
def test_memory_is_what_is_kept(spec):
    model = make_llama()
    cache = kvkeep.Cache(model, spec, 64)
    model(torch.randint(0, 128, (2, 300)), past_key_values=cache)
    claimed = 2 * 4 * 4 * 64 * 2 * 8 * 4  # rows, layers, key heads, budget, keys and values, dim, float32
    assert abs(cache.nbytes - claimed) <= 0.02 * claimed
    for _ in range(20):
        model(torch.randint(0, 128, (2, 1)), past_key_values=cache)
        held = cache.report().kept_per_head * 2 * 4 * 4 * 2 * 8 * 4
        assert held <= cache.nbytes <= 1.02 * held


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
    torch.testing.assert_close(cache.store[0].dense(0).notes[..., 0], expected, atol=1e-4, rtol=0)


def test_the_mass_of_a_long_text_is_summed_in_blocks(monkeypatch):
    """However little may be held at a time, the column sums are the same."""
    from kvkeep.kernels import reference

    q, k, _ = draw(300)
    where = torch.arange(300).expand(2, -1)
    whole = reference.column_mass(q, k, where, 300, 0.25)
    monkeypatch.setitem(reference.AT_ONCE, "cpu", 1)
    torch.testing.assert_close(reference.column_mass(q, k, where, 300, 0.25), whole, atol=1e-4, rtol=0)
    assert whole.sum().item() == pytest.approx(2 * 300, rel=1e-5)


def test_parameters_fit_in_the_name():
    queries, keys, values = draw(200)
    named = kvkeep.select("snapkv:window=16:pooling=max+adakv:alpha=0.5", queries, keys, values, 40)
    given = kvkeep.select("snapkv+adakv", queries, keys, values, 40, window=16, pooling="max", alpha=0.5)
    assert named.tolist() == given.tolist()
    assert parse("intentkv:intention=false").parameters["intention"] is False
    assert parse("snapkv:window=16", pool=7).parameters == {"window": 16, "pool": 7, "pooling": "avg"}
    assert parse("snapkv:window=16", window=8).parameters["window"] == 8  # what is said last


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("snapkv:alpha=0.5+adakv", "no parameter 'alpha'; it has window, pool, pooling"),
        ("snapkv:window", "'window' is not name=value"),
        ("snapkv:", "'' is not name=value"),
        ("snapkv:windw=3", "Did you mean 'window'"),
        ("snapkv:window=many", "window='many' should be int"),
        ("full+values", "keeps everything"),
        ("streamingllm+sinks", "orders tokens by age"),
        ("protokv+values", "below zero cannot be weighted"),
        ("snapkv+values:power=0", "power=0"),
    ],
)
def test_names_that_make_no_sense(spec, says):
    with pytest.raises(BadParameter, match=says):
        parse(spec)


@pytest.mark.parametrize("spec", EVICTING)
def test_a_method_says_whether_the_question_decides(spec):
    """Other queries at the end: another choice where a method is query-aware, the same where no query counts."""
    method, alone = parse(spec), parse(spec.partition("+")[0])
    if method.query_aware and not alone.query_aware:
        assert method.layers.weigh  # the window shares out among layers, which one layer alone cannot show
        return
    queries, keys, values = draw(300)
    asked = [kvkeep.select(spec, torch.cat([queries[:, :-8], end], 1), keys, values, 64).tolist()
             for end in (queries[:, -8:], queries[:, -8:].flip(0) * -1)]  # fmt: skip
    if method.memory is None or method.query_aware:
        assert (asked[0] != asked[1]) == method.query_aware


def test_where_every_query_counts_or_nothing_is_dropped_the_question_does_not_decide():
    aware = {name for name, method in kvkeep.methods.items() if method.query_aware}
    assert aware == {"kvkeep", "intentkv", "intelllm", "ahakv", "protokv", "tova", "snapkv", "pyramidkv", "chunkkv",
                     "nacl", "cake"}  # fmt: skip
    assert not parse("protokv+recall").query_aware and parse("snapkv+adakv").query_aware
