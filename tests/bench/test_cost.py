"""What is measured is what happened."""

import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

from kvkeep.bench.cost import Cost, Eager, Plan, Static, StaticSteps, costs
from kvkeep.bench.timing import COPIED, Roofline
from kvkeep.cli import bench
from kvkeep.cli.app import app
from kvkeep.errors import BadParameter
from kvkeep.model.random_models import SHAPES, random_model

ROOFLINE = Roofline({1: 0.001, 2: 0.001, 3: 0.002}, 1e10)
TINY = ["bench", "--shape", "tiny", "--device", "cpu", "--budget", "32", "--steps", "2"]


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch):
    monkeypatch.setitem(COPIED, "cpu", 1 << 24)


def test_costs_of_every_cell_beside_the_uncompressed_model():
    model = random_model("tiny")
    plan = Plan(("kvkeep", "snapkv", "full"), (32, 0.5), (100, 200), (1, 3), steps=2)
    found = list(costs(model, plan, roofline=ROOFLINE))
    assert len(found) == 2 * 2 * (2 + 3 * 2)
    for cost in found:
        plain = next(c for c in found if c.by == "transformers" and (c.context, c.batch) == (cost.context, cost.batch))
        assert cost.step_ratio == pytest.approx(cost.step_s / plain.step_s)
        assert cost.prefill_ratio == pytest.approx(cost.prefill_s / plain.prefill_s)
        assert cost.tokens_per_s == pytest.approx(cost.batch / cost.step_s) and cost.step_s > 0
        token = 2 * 2 * 2 * 16 * 4  # layers, KV heads, key and value, numbers, bytes
        kept = {"full": cost.context}.get(cost.method, 32 if cost.budget == 32 else cost.context // 2)
        if cost.by == "static":
            kept = -(-(cost.context + 6) // 16) * 16  # room for two steps and four to spare
        assert cost.kv_bytes == pytest.approx(kept * token, rel=0.02)
        floor = ROOFLINE.linear_s[cost.batch] + cost.batch * cost.kv_bytes / 1e10
        assert cost.roofline_s == pytest.approx(floor) and cost.roofline_ratio == pytest.approx(cost.step_s / floor)
        assert not cost.note


def test_transformers_is_measured_even_if_nobody_asks():
    plan = Plan(("snapkv",), (32,), (100,), steps=1, baselines=("static",))
    assert [c.by for c in costs(random_model("tiny"), plan, roofline=ROOFLINE)] == ["transformers", "static", "kvkeep"]
    none = Plan(("snapkv",), (32,), (100,), steps=1, baselines=())
    assert [c.by for c in costs(random_model("tiny"), none, roofline=ROOFLINE)] == ["transformers", "kvkeep"]


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_static_cache_really_moves_on(rows, device):
    model, ids = random_model("tiny", device), torch.arange(50, device=device)[None] * 7 % 256
    static, plain = Static(model), Eager(model)
    one, other = static.make(64), plain.make(64)
    with torch.inference_mode():
        model(ids, past_key_values=one)
        model(ids, past_key_values=other)
        steps = StaticSteps(model, static._copies(one, 50, rows, 8), 50, rows)
        assert device == "cpu" or steps.graph
        token, met = torch.zeros(1, 1, dtype=torch.int64, device=device), []
        for _ in range(8):
            met.append(int(token))
            assert (steps.tokens == token).all()
            expected = model(token, past_key_values=other).logits[:, -1]
            torch.testing.assert_close(steps(), expected.expand(rows, -1), rtol=1e-4, atol=1e-4)
            token = expected.argmax(-1, keepdim=True)
    assert len(set(met)) > 1


def test_what_was_read_survives_every_batch():
    model, ids = random_model("tiny"), torch.arange(50)
    eager = Eager(model)
    cache = eager.make(0)
    with torch.inference_mode():
        model(ids[None], past_key_values=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    eager.step_seconds(cache, 50, 3, 2)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_what_does_not_fit_is_noted(monkeypatch):
    def full(self, cache, context, rows, steps, before=Eager.step_seconds):
        if rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return before(self, cache, context, rows, steps)

    def none(self, tokens):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Eager, "step_seconds", full)
    monkeypatch.setattr(Static, "make", none)
    plan = Plan(("snapkv",), (32,), (100,), (1, 2), steps=1)
    found = {(c.by, c.batch): c for c in costs(random_model("tiny"), plan, roofline=ROOFLINE)}
    assert found["transformers", 1].step_s and not found["transformers", 1].note
    plain, static, ours = (found[by, 2] for by in ("transformers", "static", "kvkeep"))
    assert plain.note == "decode runs out of memory" and plain.step_s is None and plain.prefill_s
    assert static.note == "prefill runs out of memory" and static.prefill_s is static.kv_bytes is None
    assert ours.step_s and ours.step_ratio is None and ours.prefill_ratio and ours.roofline_ratio
    shown = bench.table(list(found.values()))
    assert "(decode runs out of memory)" in shown and "–" in shown


def test_roofline_are_measured():
    roofline = Roofline.measure(random_model("tiny"), (1, 4))
    assert all(0 < s < 1 for s in roofline.linear_s.values()) and set(roofline.linear_s) == {1, 4}
    assert math.isfinite(roofline.bytes_per_s) and roofline.bytes_per_s > 1e8
    assert roofline.step_time(4, 10**9)[0] > roofline.step_time(4, 10**6)[0] > roofline.linear_s[4]
    assert (roofline.step_time(4, 10**12)[1], roofline.step_time(4, 1)[1]) == ("cache", "weights")
    assert roofline.step_time(7, 1) is None


def test_a_random_model_of_a_shape_is_a_model():
    model = random_model("tiny")
    logits = model(torch.arange(20)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0 and "llama-8b" in SHAPES


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"methods": ("infllm",)}, "'infllm' retrieves"),
        ({"budgets": (0,)}, "budget=0"),
        ({"contexts": (1,)}, "at least 2 tokens"),
        ({"batches": (0,)}, "1 sequence"),
        ({"baselines": ("vllm",)}, "no baseline named 'vllm'; known: transformers, static"),
    ],
)
def test_plans_that_make_no_sense(plan, says):
    with pytest.raises(BadParameter, match=says):
        Plan(**{"methods": ("snapkv",), "budgets": (64,), "contexts": (128,), **plan})


def test_a_table_fits_a_page():
    long = Cost("kvpress", "snapkv:window=16+adakv:alpha=0.5", 131072, 1048576, 64, 123.4, 1.5, 1.2, 12.3, 54321.0,
                137 * 10**9, 139 * 10**9, 1.1, "weights", 1.1)  # fmt: skip
    lines = bench.table([long, Cost("static", "full", None, 8, 1, note="prefill runs out of memory")]).splitlines()
    assert max(map(len, lines)) <= 100 and "1,048,576 tokens, 64 sequences" in lines and "…" in lines[2]


def test_the_command(tmp_path):
    done = CliRunner().invoke(app, [*TINY, "--length", "100", "--batch", "1,2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert all(word in done.stdout for word in ("kvkeep", "StaticCache", "tok/s", "prefill s", "roofline ms, by"))
    assert max(map(len, done.stdout.splitlines())) <= 100
    rows = json.loads((tmp_path / "costs.json").read_text())
    assert len(rows) == 6 and {row["by"] for row in rows} == {"transformers", "static", "kvkeep"}
    assert all(row["roofline_s"] > 0 and row["bound_by"] in ("weights", "cache") for row in rows)
    wrong = CliRunner().invoke(app, ["bench", "--shape", "llama-9b"])
    assert wrong.exit_code == 2 and "llama-8b" in wrong.stderr


@pytest.mark.parametrize("contexts", [(8,), (8, 16), (8, 64)])
def test_pictures(tmp_path, contexts):
    pytest.importorskip("matplotlib")
    from kvkeep.cli.bench_plots import draw

    found = [
        Cost(by, "m", None, n, b, 1.0, 1.0, None if (by, b) == ("static", 4) else 0.1 * n, kv_bytes=n, note="no memory")
        for n in contexts
        for b in (1, 4)
        for by in ("transformers", "static", "kvkeep")
    ]
    empty = [Cost("transformers", "full", None, 8, 1, note="prefill runs out of memory")]
    for rows in (found, [cost.with_roofline(ROOFLINE) for cost in found], empty):
        assert draw(rows, tmp_path) == ["decode.png", "memory.png"]
        for name in ("decode.png", "memory.png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_costs_of_others_are_shown_beside(tmp_path):
    other = {"by": "kvpress", "method": "snapkv", "budget": 32, "context": 100, "batch": 1, "step_s": 0.5,
             "kv_bytes": 10**6, "note": "from afar"}  # fmt: skip
    (tmp_path / "k.json").write_text(json.dumps([other]))
    args = [*TINY, "--length", "100,800", "--also", str(tmp_path / "k.json"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "kvpress: snapkv 32" in done.stdout and "(from afar)" in done.stdout
    last = json.loads((tmp_path / "costs.json").read_text())[-1]
    assert last["by"] == "kvpress" and last["roofline_ratio"] > 1
    (tmp_path / "bad.json").write_text('[{"speed": 3}]')
    for name, says in (("no.json", "cannot be read"), ("bad.json", "not a list of costs")):
        wrong = CliRunner().invoke(app, [*TINY, "--also", str(tmp_path / name)])
        assert wrong.exit_code == 2 and says in wrong.stderr


def test_what_is_missing_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvkeep.cli.bench_plots", None)  # as where matplotlib is not installed
    args = [*TINY, "--length", "100", "--baselines", "transformers,kvpress", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "StaticCache" not in done.stdout and done.stderr.count("kvpress_costs.py") == 1
    assert done.stderr.count("matplotlib is not installed") == 1 and (tmp_path / "costs.json").exists()


def test_fewer_bits_are_measured_beside_the_models_own():
    plan = Plan(("snapkv", "h2o"), (128,), (300,), (1, 2), steps=2, storages=(None, "int8", "int4"), baselines=())
    found = [cost for cost in costs(random_model("tiny"), plan, roofline=ROOFLINE) if cost.by == "kvkeep"]
    assert [cost.storage for cost in found] == [None, None, "int8", "int8", "int4", "int4"] * 2
    for method in ("snapkv", "h2o"):
        sizes = [cost.kv_bytes for cost in found if cost.method == method and cost.batch == 1]
        assert sizes[0] > 1.5 * sizes[1] > 1.5 * sizes[2] and all(cost.step_s > 0 for cost in found)
    done = CliRunner().invoke(app, [*TINY, "--length", "100", "--storage", "int8", "--baselines", "transformers"])
    assert "kvkeep_lookahead 32 int8" in done.output and done.exit_code == 0
    with pytest.raises(BadParameter, match="storage='int3' is not known"):
        Plan(("snapkv",), (128,), (300,), storages=("int3",))
