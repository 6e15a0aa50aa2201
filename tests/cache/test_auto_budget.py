"""budget="auto": the scores decide how much is kept, after every prefill, within an upper bound."""

import pytest
import tiny_chat
import torch
from conftest import make_llama
from oracles.frontier import coverage

import kvkeep
from kvkeep.cache import passes
from kvkeep.cli import inputs
from kvkeep.cli.eval import shaped
from kvkeep.compress.method import Method
from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.grid import Grid

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(5))[None]
NUMBERS = torch.rand(4, 400, generator=torch.Generator().manual_seed(1)) ** 8
LAYERS = HEADS = 4


def by_position(seen, budget):
    """A score of a KV head and token position, whatever else is there."""
    where = seen.token_positions.long().clamp_max(399)
    return NUMBERS[: seen.kv_heads].gather(1, where)


def kept(cache, row=0):
    return [cache.kept(layer)[row] for layer in range(LAYERS)]


def running(parts, share, most):
    """One layer's kept tokens after each part of a prompt: of what is held and new, as much as makes up the share."""
    held, seen = [[] for _ in range(HEADS)], 0
    for part in parts:
        there = [[*head, *range(seen, seen + part)] for head in held]
        seen += part
        scores = [[[float(NUMBERS[h][j]) for j in head] for h, head in enumerate(there)]]
        chosen = coverage(scores, [[[]] * HEADS], max(1, int(most * seen)), share)[0]
        held = [[head[j] for j in where] for head, where in zip(there, chosen, strict=True)]
    return held


@pytest.mark.parametrize("most", [0.5, 0.1])
@pytest.mark.parametrize("parts", [(128,), (50, 78), (30, 30, 30, 38)])
def test_each_chunk_is_covered_with_what_is_held(parts, most):
    model, method = make_llama(), Method("table", by_position)
    cache = kvkeep.Cache(model, method, "auto", max_budget=most)
    for part in IDS.split(parts, 1):
        model(part, past_key_values=cache)
    assert kept(cache) == [running(parts, 0.99, most)] * LAYERS
    alone = kvkeep.Cache(model, method, "auto", max_budget=most)
    alone.defer_eviction(128)
    for part in IDS.split(parts, 1):
        model(part, past_key_values=alone)
    assert kept(alone) == [running((128,), 0.99, most)] * LAYERS


@pytest.mark.parametrize("spec", ["kvzip", "kvkeep_context", "kvzip+adakv"])
@pytest.mark.parametrize("tau", [None, 0.02, 0.03])
def test_where_a_text_is_fed_again_what_scores_above_tau_is_kept(spec, tau, monkeypatch):
    """And the first four tokens; of all layers, within the bound, however even the scores are."""
    found, own = {}, passes.replay_scores
    monkeypatch.setattr(passes, "replay_scores", lambda *given: found.update(own(*given)) or own(*given))
    model = make_llama()
    cache = kvkeep.Cache(model, spec, "auto", max_budget=1.0, **({} if tau is None else {"tau": tau}))
    model(IDS, past_key_values=cache)
    least = tau or (0.01 if spec == "kvkeep_context" else 0.003)
    want = [[[j for j, score in enumerate(head) if j < 4 or score > least] for head in found[i, 0].tolist()]
            for i in range(LAYERS)]  # fmt: skip
    assert kept(cache) == want
    assert tau is None or 4 < cache.report().kept_per_head < 128
    bound = kvkeep.Cache(model, spec, "auto", max_budget=0.25, tau=0.0)
    model(IDS, past_key_values=bound)
    assert bound.report().kept_per_head == 32


def test_a_token_without_a_hidden_state_has_a_score_within_bounds(monkeypatch):
    """KVzip+ divides by the hidden state's norm: by no less than a hundredth of the median."""
    found, own = [], passes.replay_scores
    monkeypatch.setattr(passes, "replay_scores", lambda *given: found.append(own(*given)) or found[-1])
    for size in (1.0, 1e-9):
        model = make_llama()
        with torch.no_grad():
            model.get_input_embeddings().weight[int(IDS[0, 64])] *= size
        model(IDS, past_key_values=kvkeep.Cache(model, "kvzip_plus", 0.25))
    usual, tiny = (max(float(scores.max()) for scores in each.values()) for each in found)
    assert tiny < 200 * usual


@pytest.mark.parametrize("spec", ["kvkeep", "snapkv", "snapkv+adakv", "kvkeep_context", "kvzip", "expected_attention"])
def test_more_coverage_takes_more_and_the_report_says_so(spec):
    model = make_llama()
    sizes = []
    for share in (0.2, 0.6, 0.9, 1.0):
        cache = kvkeep.Cache(model, spec, "auto", coverage=share, max_budget=1.0)
        model(IDS, past_key_values=cache)
        report = cache.report()
        sizes.append(report.kept_per_head)
        # a floor, or a unit that is cut, may cost a little of what the best tokens would have covered
        assert report.coverage >= share - (0.1 if spec == "kvkeep" else 0.03 if spec == "snapkv+adakv" else 1e-6)
        assert f"scores covered    {report.coverage:.1%}" in str(report)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] <= 128


def test_rows_are_covered_by_themselves():
    model = make_llama()
    both, short = IDS.repeat(2, 1), IDS[:, :90]
    mask = torch.ones_like(both)
    mask[1, :38] = 0
    both[1, 38:] = short
    for spec in ("snapkv", "snapkv+adakv", "snapkv+shared"):
        cache = kvkeep.Cache(model, spec, "auto", coverage=0.5, window=8)
        model(both, attention_mask=mask, past_key_values=cache)
        shares = []
        for row, ids in enumerate((IDS, short)):
            alone = kvkeep.Cache(model, spec, "auto", coverage=0.5, window=8)
            model(ids, past_key_values=alone)
            assert kept(cache, row) == kept(alone)
            shares.append(alone.report().coverage)
        assert cache.report().coverage == pytest.approx(sum(shares) / 2)


@pytest.mark.parametrize("schedule", ["prompt", "step", 16])
def test_decode_keeps_to_the_upper_bound_alone(schedule):
    """Covered again at every step, less and less would be left."""
    model, most = make_llama(), 80
    cache = kvkeep.Cache(model, Method("table", by_position), "auto", max_budget=most, schedule=schedule)
    model(IDS, past_key_values=cache)
    after_prompt = cache.report().kept_per_head
    held = []
    for step in range(100):
        model(IDS[:, step : step + 1], past_key_values=cache)
        held.append(cache.report().kept_per_head)
    assert after_prompt < most - 10
    bound = {"prompt": after_prompt + 100, "step": most, 16: most + 15}[schedule]
    assert max(held) == bound and held[9] == after_prompt + 10 and min(held) > after_prompt


def test_what_was_generated_is_no_amount():
    """echo does not score it, and evicts it last: it neither goes nor uses the coverage of a later turn up."""
    model = make_llama()
    cache = kvkeep.Cache(model, "echo", "auto", coverage=0.5)
    model(IDS[:, :90], past_key_values=cache)
    for token in IDS[0, 90:100]:
        model(token.view(1, 1), past_key_values=cache)
    before = kept(cache)
    model(IDS[:, 100:], past_key_values=cache)
    for layer, (first, then) in enumerate(zip(before, kept(cache), strict=True)):
        for head, after in zip(first, then, strict=True):
            assert set(range(90, 100)) <= set(after), layer
            assert set(after) & set(range(90)) <= set(head)
    left = sum(j < 90 for layer in kept(cache) for head in layer for j in head)
    assert left > 4 * LAYERS * HEADS and 0.5 <= cache.report().coverage < 0.6


@pytest.mark.parametrize("spec", ["echo", "kvzip:layerwise=true"])
def test_nor_weighted_by_its_values(spec):
    """Old: below what is certain, a generated token's score was all there was, and the text was evicted."""
    left = []
    for modifier in ("", "+values"):
        model = make_llama()
        cache = kvkeep.Cache(model, spec + modifier, "auto", max_budget=0.9, coverage=0.99)
        for ids in (IDS[:, :100], *IDS[:, :8].T[:, None], IDS[:, 100:120]):
            model(ids, past_key_values=cache)
        left.append(sum(j < 100 for layer in kept(cache) for head in layer for j in head) / LAYERS / HEADS)
    assert min(left) > 80


def test_forks_rows_and_files_go_on(tmp_path):
    model = make_llama()
    cache = kvkeep.Cache(model, "snapkv", "auto", coverage=0.4, window=8)
    model(torch.cat([IDS, IDS.flip(1)]), past_key_values=cache)
    fork = cache.fork()
    cache.save(tmp_path / "saved")
    loaded = kvkeep.Cache.load(tmp_path / "saved", model)
    assert kept(fork) == kept(cache) == kept(loaded) and fork.report().coverage == cache.report().coverage
    assert loaded.method == cache.method and loaded.method.coverage == 0.4 and loaded.budget == 0.5
    cache.reorder_cache(torch.tensor([1, 1]))
    alone = kvkeep.Cache(model, "snapkv", "auto", coverage=0.4, window=8)
    model(IDS.flip(1), past_key_values=alone)
    assert cache.report().coverage == pytest.approx(alone.report().coverage)


@pytest.mark.parametrize(
    "spec",
    ["knorm", "satkv", "nacl", "lagkv", "random", "streamingllm", "rkv", "compactor", "quest", "snapkv+critical"],
)
def test_scores_that_do_not_add_up_are_refused_by_name(spec):
    with pytest.raises(
        BadParameter, match=rf"'{spec.replace('+', '.')}' cannot work with budget='auto'.*Give a number"
    ):
        kvkeep.Cache(make_llama(), spec, "auto")


def test_other_values_are_refused():
    model = make_llama()
    for share in (0, -0.1, 1.5):
        with pytest.raises(BadParameter, match=f"coverage={float(share)}: use more than 0, up to 1"):
            kvkeep.Cache(model, "snapkv", "auto", coverage=float(share))
    with pytest.raises(BadParameter, match="tau=0.1 takes the place of coverage="):
        kvkeep.Cache(model, "kvzip", "auto", coverage=0.9, tau=0.1)
    with pytest.raises(BadParameter, match="budget='some' is not a number; use .* or 'auto'"):
        kvkeep.Cache(model, "snapkv", "some")
    with pytest.raises(BadParameter, match="budget=1.5 is not a fraction"):
        kvkeep.Cache(model, "snapkv", "auto", max_budget=1.5)
    with pytest.raises(BadParameter, match="'snapkv' has no parameter 'coverage'"):
        kvkeep.Cache(model, "snapkv", 60, coverage=0.9)
    with pytest.raises(BadParameter, match="floor= is a part of a budget"):
        kvkeep.Cache(model, "snapkv+shared:floor=0.5", "auto")
    with pytest.raises(BadParameter, match="changed or cut off already"):
        kvkeep.Cache(model, "snapkv+threshold", "auto")


def test_a_request_has_its_own_method_or_budget_in_the_place_of_the_engines():
    """Old: another method lost "auto", and another budget kept it."""
    text = "the quick brown fox jumps over the lazy dog. " * 4
    with kvkeep.Engine(*tiny_chat.sharp(), "snapkv", "auto", coverage=0.5, max_budget=0.9, window=8) as engine:

        def kept_of(**how):
            handle = engine.submit(text, max_new_tokens=1, **how)
            handle.result()
            return handle.request.kept_tokens

        tokens = engine.length(text)
        assert kept_of() < 0.8 * tokens and kept_of(method="tova") < 0.8 * tokens
        assert kept_of(budget=100) == 100 and kept_of(method="tova", budget=100) == 100


def test_an_engine_covers_prompts_and_contexts():
    chat, text = tiny_chat.sharp(), "the quick brown fox jumps over the lazy dog. " * 8
    engine = kvkeep.Engine(*chat, budget="auto", coverage=0.3, history=None)
    answers = engine.generate([text, text[:200]], max_new_tokens=6)
    assert answers == [engine.generate(each, max_new_tokens=6) for each in (text, text[:200])]
    report = engine.cache.report()
    assert report.method == "kvkeep_lookahead+auto" and report.budget == 0.5 and 0.2 < report.coverage < 0.6
    context = engine.read(text)
    assert context.report().method == "kvkeep_context+auto" and 0.3 <= context.report().coverage < 0.4
    whole = [kvkeep.Engine(*chat, "full", budget).generate(text, max_new_tokens=6) for budget in ("auto", 100)]
    assert whole[0] == whole[1]


def test_the_command_line_and_a_grid_take_it():
    (plan,) = inputs.plans("kvkeep_context", "auto", ["coverage=0.9", "max_budget=0.25"])
    assert plan.budget == "auto" and plan.parameters == {"coverage": 0.9, "max_budget": 0.25}
    with pytest.raises(BadInput, match="--budget 'most' is not a number; give .* or auto"):
        inputs.plans("snapkv", "most", [])
    with pytest.raises(BadParameter, match="'random' cannot work with budget='auto'"):
        inputs.plans("random", "auto", [])
    assert shaped("budget", "auto,64,0.1") == ("auto", 64, 0.1) and shaped("budget", ["auto"]) == ("auto",)
    assert Grid(("full", "snapkv"), ("auto", 64)).configs == [("full", None), ("snapkv", "auto"), ("snapkv", 64)]
    with pytest.raises(BadParameter, match="'knorm' cannot work with budget='auto'"):
        Grid(("knorm",), ("auto",))


@pytest.mark.parametrize("spec", ["kvkeep_context", "kvzip+shared"])
def test_sinks_are_kept_where_nothing_scores_enough(spec):
    model = make_llama()
    cache = kvkeep.Cache(model, spec, "auto", max_budget=1.0, tau=1e5)
    model(IDS, past_key_values=cache)
    assert kept(cache) == [[[0, 1, 2, 3]] * HEADS] * LAYERS
