"""The papers' figures of internals: every one is drawn, and its numbers are right where they are known beforehand."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import tiny_chat
import torch
from torch.nn.functional import normalize

from kvkeep.evaluate.recipes.recipe import names, recipe
from kvkeep.types import Observation

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("figures", "figures_protokv", "claims", "claims_attention", "probe")
DRAWN = [
    "intentkv/figure2", "intentkv/figure3", "intentkv/figure6-8", "intelllm/figure1", "ahakv/figure1", "ahakv/figure2",
    "actqkv/figure3", "actqkv/figure5", *(f"protokv/figure{number}" for number in (2, 3, 4, 5, 6, 30, 31, 32, 38)),
]  # fmt: skip


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("figures")
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def lab(figures, tmp_path):
    model, tokenizer = tiny_chat.sharp()
    examples = "".join(f"Question: what of {word}?\nType: {word}\n" for word in ("lamp", "rain", "boat") * 12)
    for task in ("narrativeqa", "multifieldqa_en", "triviaqa", "trec"):
        text = examples if task == "trec" else "It rained on the lamps. " * 60 + "A boat."
        line = {"input": "What is it?", "context": text, "answers": ["A boat"], "all_classes": ["lamp"], "_id": "1"}
        (tmp_path / f"{task}.jsonl").write_text(json.dumps({**line, "dataset": task, "length": 9, "language": "en"}))
    prose = tokenizer("It rained. " * 300).input_ids
    return figures.Lab(model, tokenizer, prose, 1, 1, tmp_path, 900, True)


@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_is_drawn(figures, lab, monkeypatch, name):
    monkeypatch.setattr(figures.probe, "NEAR", 128)
    with torch.inference_mode():
        shown = figures.FIGURES[name](lab)
    lines = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(lines) >= 3 and not any("nan" in line.lower() for line in lines if "figure4" not in name), shown


def test_every_figure_that_a_recipe_names_can_be_drawn_and_no_other(figures):
    asked = {name for name in names() if "benchmarks/figures.py" in recipe(name).command}
    assert asked == set(figures.FIGURES)
    drawn = {figures.FIGURES[name] for name in DRAWN}
    assert drawn == set(figures.FIGURES.values())


def seen_of(queries, keys):
    n, kv_heads = keys.shape[1], len(keys)
    return Observation(queries, keys, keys, torch.arange(n).expand(kv_heads, n), (n,) * kv_heads, n, n, 1.0)


def test_few_tokens_cover_the_attention_of_one_query_and_not_of_many(figures):
    """Every query looks at a key of its own: one key is enough for each, many are needed for all."""
    n, dim = 1024, 256
    keys, queries = torch.zeros(1, n, dim), torch.zeros(1, n, dim)
    keys[0, torch.arange(100, 100 + dim), torch.arange(dim)] = 1.0
    queries[0, n - dim :] = 40 * torch.eye(dim)
    one, many, peak, beside = figures._coverage(seen_of(queries, keys)).tolist()
    assert one == pytest.approx(1) and many == pytest.approx(33 / 256, abs=0.01)
    assert peak == pytest.approx(1) and beside == pytest.approx(0, abs=1e-6)


def test_all_but_what_is_looked_at_is_sparse(figures):
    """Alike queries look at the same three tokens."""
    n = 512
    keys, queries = torch.zeros(2, n, 4), torch.ones(2, n, 4)
    keys[:, [5, 50, 100]] = 10.0
    found = figures._sparsity(seen_of(queries, keys))
    assert found[: len(figures.DISTANCES)].tolist() == pytest.approx([1.0] * len(figures.DISTANCES), abs=1e-5)
    assert found[-1] == pytest.approx(1 - 3 / 385, abs=3e-3)


def test_divergence_is_nothing_between_equal_rows_and_log_2_between_disjoint_ones(figures):
    rows = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1.0, 0]])
    assert figures._jsd(rows)[0].tolist() == pytest.approx([0, 0, 0.6931], abs=1e-4)


def test_the_clustering_degree_is_definition_3(figures):
    """Beside the sums over pairs, written out."""
    torch.manual_seed(0)
    keys, chosen = normalize(torch.randn(2, 9, 4) + 1, dim=2), torch.zeros(2, 9, dtype=torch.bool)
    chosen[0, [1, 4, 5]] = True
    pairs = keys[0] @ keys[0].T
    inside, outside = chosen[0], ~chosen[0]
    right = pairs[inside][:, inside].mean() / pairs[inside][:, outside].mean()
    found = figures.protokv.clustering_degree(keys, chosen)
    assert found[0] == pytest.approx(right.item(), rel=1e-5) and found[1].isnan()


def test_attention_is_split_by_degree_and_the_first_tokens_can_be_left_out(figures):
    """Of 40 tokens of context, alike but for token 20 and the first, decoded tokens look at these two alone."""
    n = 40 + figures.protokv.DECODED
    keys, queries = torch.zeros(1, n, 4), torch.zeros(1, n, 4)
    keys[..., 1] = 1.0
    keys[:, [0, 20]] = torch.tensor([9.0, 0, 0, 0])
    queries[..., 0] = 3.0
    whole, rest = (figures.protokv.tenths(seen_of(queries, keys), skip) for skip in (0, 10))
    assert whole[0] == pytest.approx(1, abs=1e-4) and rest[0] == pytest.approx(1, abs=1e-4)
    queries[..., 0] = 0.0  # even attention
    assert figures.protokv.tenths(seen_of(queries, keys), 0).tolist() == pytest.approx([0.1] * 10, abs=1e-5)


def test_the_time_of_scoring_is_read_from_a_clock_that_waits_for_the_device(figures, monkeypatch, capsys):
    """IntelLLM's latency, of any model on any device. Here every reading is a second after the last."""
    scoring = importlib.import_module("scoring")
    model, read = tiny_chat.model(), []

    def now(device):
        read.append(device)
        return float(len(read))

    monkeypatch.setattr(scoring, "now", now)
    monkeypatch.setattr(scoring, "load", lambda name, device: (read.append((name, device)), (model, None))[1])
    argv = ["scoring.py", "--model", "some/where", "--device", "cpu", "--length", "300", "--budget", "64", "--methods"]
    monkeypatch.setattr(sys, "argv", [*argv, "intelllm", "intelllm:keep_head=False"])
    scoring.main()
    sys.modules.pop("scoring")
    assert read.pop(0) == ("some/where", "cpu")
    assert set(read) == {model.device} and not hasattr(scoring, "time")
    *_, one, other = (list(map(float, line.split(" | ")[1:3])) for line in capsys.readouterr().out.splitlines()[2:])
    per_layer = 4  # around the call, and the model's own attention, which was checked before
    assert one == other and sum(one) == 1000 * (per_layer * model.config.num_hidden_layers + 1)
