"""What a recipe's run must not hide, and what its numbers are made of: samples, averages, settings."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_chat
import torch
from typer.testing import CliRunner

from kvkeep.cli import reproduce as command
from kvkeep.cli.app import app
from kvkeep.errors import BadInput, NoData
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.metrics.longbench import CATEGORIES, averages
from kvkeep.evaluate.recipes.compare import row_name
from kvkeep.evaluate.recipes.jobs import jobs, used
from kvkeep.evaluate.recipes.recipe import recipe, shrink
from kvkeep.evaluate.results import Results
from kvkeep.evaluate.suite import RULER_SAMPLES, Sources, load
from kvkeep.evaluate.tasks.needle import DEPTHS
from kvkeep.types import Observation

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


# --- only a grid without data may be left out ---


def second_fails(monkeypatch, error):
    """Every grid but the second has its rows."""
    asked = []

    def run(wanted, say, note):
        asked.append(wanted)
        if len(asked) == 2:
            raise error
        return [], {}

    monkeypatch.setattr(command.evaluation, "run", run)
    return asked


def test_a_grid_without_data_is_left_out_and_the_others_run(monkeypatch, tmp_path):
    asked = second_fails(monkeypatch, NoData("none of these tasks can be had: fwe is not here."))
    done = CliRunner().invoke(app, ["reproduce", "ahakv/table1", "--out", str(tmp_path)])
    assert done.exit_code == 0 and "left out: none of these tasks" in done.output
    assert len(asked) == len(jobs(recipe("ahakv/table1"))) > 2


def test_whatever_else_is_wrong_ends_the_run(monkeypatch, tmp_path):
    second_fails(monkeypatch, BadInput("'rows.jsonl' cannot be written (No space left on device)"))
    done = CliRunner().invoke(app, ["reproduce", "ahakv/table1", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "No space left" in done.output
    assert not (tmp_path / "comparison.csv").exists()


def test_no_samples_at_all_is_no_data(tmp_path):
    with pytest.raises(NoData, match="none of these tasks can be had: math500 has no file"):
        load(["math500"], tiny_chat.tokenizer(), Sources(data=tmp_path))
    (tmp_path / "math500.jsonl").write_text("{]\n")
    with pytest.raises(BadInput) as caught:
        load(["math500"], tiny_chat.tokenizer(), Sources(data=tmp_path))
    assert not isinstance(caught.value, NoData)


# --- samples ---


@pytest.mark.parametrize(
    ("limit", "depths"), [(1, [56]), (2, [22, 78]), (3, [11, 56, 89]), (9, None), (10, DEPTHS), (50, DEPTHS)]
)
def test_fewer_needles_are_spread_over_lengths_and_depths(limit, depths):
    samples, _ = load(["needle"], tiny_chat.tokenizer(), Sources(lengths=(1000, 2000), limit=limit))
    for length in (1000, 2000):
        found = [sample.extra["depth"] for sample in samples if sample.extra["length"] == length]
        assert len(found) == len(set(found)) == min(limit, len(DEPTHS)) and found == sorted(found)
        assert depths is None or found == list(depths)
    if limit < len(DEPTHS):
        every, _ = load(["needle"], tiny_chat.tokenizer(), Sources(lengths=(1000, 2000)))
        assert all(sample in every for sample in samples)  # fewer, not others


def test_problems_of_two_years_stay_apart(tmp_path):
    for year in ("aime24", "aime25"):
        (tmp_path / f"{year}.jsonl").write_text(json.dumps({"id": 0, "problem": "1 + 1?", "answer": "2"}))
    samples, _ = load(["aime24", "aime25"], tiny_chat.tokenizer(), Sources(data=tmp_path))
    assert [sample.task for sample in samples] == ["aime24", "aime25"]
    assert [row_name((sample.task, None)) for sample in samples] == ["aime24", "aime25"]  # as recipes look for them


@pytest.mark.parametrize("name", ["eval", "reproduce"])
def test_the_help_says_how_many_samples_of_ruler_there_are(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert f"{RULER_SAMPLES} of RULER (officially 500)" in shown


# --- settings ---


def test_small_windows_drop_something():
    """Where they have room for all that is left of a prompt, they are the full cache under another name."""
    for name in ("intelllm/table1", "intelllm/table2"):
        small = shrink(recipe(name))
        assert all(used(small, cell) < small.max_length for cell in small.cells if cell.spec != "full")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("intelllm/table1", "All but Full, which has the model's context length, 8K, get whole prompts"),
        *((f"actqkv/table{number}", "full context has the model's context length, 8K") for number in (1, 2, 3, 9)),
        *((f"ahakv/table{number}", "choose once, after the prompt") for number in (1, 2, 3)),
    ],
)
def test_a_recipe_says_where_it_differs_from_the_paper(name, words):
    assert words in " ".join(recipe(name).notes)


def test_measurements_ask_for_what_was_measured():
    assert recipe("intentkv/figure4").command.startswith("kvkeep bench")  # which has the full cache and memory
    assert "--max-new-tokens 71" in recipe("actqkv/table10").command


# --- metrics ---


def test_more_digits_than_an_integer_may_have():
    long = "9" * 5000
    score = METRICS["infinitebench"]
    assert score(f"1 {long}", ["[1, 2, 3, 4]"], dataset="math_calc") == 0.25
    assert score("01 2 3 5", ["[1, 2, 3, 4]"], dataset="math_calc") == 0.75
    assert score(long, ["[7]"], dataset="math_find") == 0.0
    assert score("it is 007", ["[7]"], dataset="math_find") == 1.0
    assert score("000", ["[0]"], dataset="math_find") == 1.0


def by_category(scores):
    return {task: score for tasks, score in zip(CATEGORIES.values(), scores, strict=True) for task in tasks}


def test_both_averages_of_longbench_are_those_printed():
    """ChatGLM3's category means are in LongBench's README, IntentKV prints 16 scores of Llama-3.1 and their mean."""
    found = averages(by_category([40.3, 46.6, 29.5, 68.1, 50.5, 56.2]))
    assert list(found) == ["LongBench, mean of 16 tasks", "LongBench, mean of 6 categories"]
    assert [round(number, 1) for number in found.values()] == [47.9, 48.5]
    table = recipe("intentkv/table10")
    full = {cell.column: cell.number for cell in table.cells if cell.label == "FullKV"}
    tasks = {column.points[0][0].rpartition("/")[2]: full[column.name] for column in table.columns[:-1]}
    assert sum(tasks.values()) == pytest.approx(785.8)
    assert round(averages(tasks)["LongBench, mean of 16 tasks"], 1) == full[table.average] == 49.1


def test_averages_say_of_how_many_tasks_they_are():
    scores = {"qasper_e": 10.0, "multifieldqa_en_e": 20.0, "lcc_e": 60.0, "trec": 1.0, "vcsum": 5.0}
    assert averages(scores) == {"LongBench-E, mean of 3 tasks": 30.0, "LongBench-E, mean of 2 categories": 37.5}
    assert averages({}) == {}


# --- scripts ---


def test_rows_of_a_search_may_hold_any_line_end(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("search_script", BENCHMARKS / "search.py")
    search = importlib.util.module_from_spec(spec)
    monkeypatch.delitem(sys.modules, "pool", raising=False)
    spec.loader.exec_module(search)
    row = {"task": "t", "id": "1", "protocol": "aware", "method": "full", "budget": None, "answer": "a\u2028b\u0085c"}
    Results(tmp_path / "rows.jsonl").add(row)
    assert search.read(tmp_path) == [row] == [json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8"))]


# --- claims ---


def test_outliers_are_counted_on_the_context_and_without_its_first_tokens(monkeypatch):
    """Of what written tokens give 20 tokens of context: even attention, then all of it on the first token."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("claims_script", BENCHMARKS / "claims.py")
    claims = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "claims_script", claims)
    spec.loader.exec_module(claims)
    keys = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0))
    keys[:, :, 0] = 0
    where = torch.arange(24).expand(2, -1)
    even = Observation(torch.zeros(4, 24, 8), keys, keys, where, (24, 24), 24, 24, 1.0)
    assert claims.decode_shares(even, 20, 4) == pytest.approx([2 / 20, 4 / 20, 2 / 16])
    keys[:, 0, 0], queries = 9.0, torch.zeros(4, 24, 8)
    queries[..., 0] = 3.0  # e^27 against 1: the first token gets nearly all there is
    shares = claims.decode_shares(replace(even, queries=queries), 20, 4)
    assert shares[1] == pytest.approx(1) and shares[2] == pytest.approx(2 / 16, abs=1e-3)
