"""Figures of the papers: points with and without a printed number, drawn from the same grids as tables."""

import json

import pytest
import tiny_chat
from test_recipes import measured, run

from kvkeep.cli import reproduce as command
from kvkeep.evaluate.recipes.compare import compare, counts
from kvkeep.evaluate.recipes.recipe import Cell, recipe, shrink

QUOTED = [  # a figure's numbers, and the tables that print them: (name, column there, column in the figure)
    ("intentkv/figure5", [("intentkv/table1", "Avg.", "Avg."), ("intentkv/table4", "Avg.", "Avg.")]),
    ("protokv/figure8", [("protokv/figure33", "Avg.", "LongBench"), ("protokv/table10", "LongBench", "LongBench")]),
    ("actqkv/figure4", [("actqkv/table3", None, None), ("actqkv/table2", None, None)]),
]


@pytest.mark.parametrize(("name", "sources"), QUOTED, ids=[name for name, _ in QUOTED])
def test_numbers_of_a_figure_are_those_its_note_names(name, sources):
    printed = {}
    for table_, there, here in sources:
        for cell in recipe(table_).cells:
            if there in (None, cell.column):
                group = cell.group.removesuffix("-inst")
                printed[group, cell.label, cell.budget, here or cell.column] = cell.number
    printed["Llama3-8B", "ProtoKV", 512, "LongBench"] = 40.76  # ProtoKV's table 3, prefilling
    found = [cell for cell in recipe(name).cells if cell.number is not None and not cell.beside]
    assert found and all(printed[c.group, c.label, c.budget, c.column] == c.number for c in found)


def test_a_figure_draws_every_label_at_every_budget_and_prints_what_is_known():
    each = recipe("protokv/figure8")
    found = {(c.group, c.label, c.budget): c.number for c in each.cells}
    assert len(found) == len(each.cells) == 3 * (7 * 4 + 1)  # ProtoKV twice, the full cache once
    assert found["Llama3-8B", "SnapKV", 64] is None and found["Llama3-8B", "SnapKV", 128] == 35.92
    assert found["Mistral-7B", "FullKV", None] == 40.29
    assert [c.budget for c in each.cells if c.label == "H2O"] == [64, 128, 256, 512] * 3  # as drawn, not as printed
    assert Cell("Llama2-7B", "ProtoKV", "protokv:chunks=500", 512, "LongBench") in each.cells


# --- methods ---


def test_ablations_of_the_papers_are_the_parameters_they_name():
    wanted = {
        ("ahakv/table2", "w/o RA"): "ahakv:recent_only=False",
        ("ahakv/table2", "w/o RA, literal"): "ahakv:recent_only=False:gain=multiply",
        ("actqkv/table9", "Reverse Impl."): "actqkv:reverse=True",
        **{("protokv/table3", f"{label}, prefilling"): f"{name}:once=True"
           for label, name in {"SentenceKV": "sentencekv", "ClusterKV": "clusterkv", "SqueezeAtt": "squeezed"}.items()},
        ("protokv/table3", "ProtoKV, decoding"): "protokv:chunks=500+recall",
        ("protokv/table3", "ProtoKV, decoding, literal"): "protokv:chunks=500:votes=raw+recall",
        ("protokv/figure10", "chunk-clustering"): "protokv:prototypes=chunks:chunks=504",
    }  # fmt: skip
    for (name, label), spec in wanted.items():
        assert {cell.spec for cell in recipe(name).cells if cell.label == label} == {spec}


# --- ours beside theirs ---


def test_a_point_without_a_number_is_measured_all_the_same():
    each = shrink(recipe("ahakv/figure4"))
    lines = compare(each, {"LLaMA2-7B": measured("openbookqa", "ahakv", 0.1, [1.0, 0.0])})
    line = next(line for line in lines if (line.method, line.budget, line.column) == ("AhaKV", 0.1, "OpenBook"))
    assert (line.paper, line.ours, line.n) == (None, 50.0, 2)
    assert command._cells(line)[3] == "–"


def test_answered_numbers_are_counted_by_method_and_budget():
    said = [("full", None, "段落7"), ("h2o", 200, "Paragraph 3, or 9"), ("h2o", 200, " 3"), ("h2o", 200, "nothing")]
    rows = [{"method": method, "budget": budget, "answer": answer} for method, budget, answer in said]
    assert counts(rows) == {"full": {7: 1}, "h2o 200": {3: 2, None: 1}}


# --- the command ---


def test_a_figure_of_answers_counts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "kvkeep.model.load.load", lambda name, **_: (tiny_chat.model(window=4096), tiny_chat.tokenizer())
    )
    monkeypatch.setattr("kvkeep.model.load.load_tokenizer", lambda name, say=None: tiny_chat.tokenizer())
    facts = {"length": 9, "dataset": "passage_retrieval_en", "language": "en", "all_classes": None}
    sample = {
        "input": "the lamp",
        "context": "Paragraph 1: lamps. " * 30,
        "answers": ["Paragraph 1"],
        "_id": "1",
        **facts,
    }
    (tmp_path / "passage_retrieval_en.jsonl").write_text(json.dumps(sample))
    done = run("ahakv/figure7", small=True, out=str(tmp_path / "out"), data=str(tmp_path))
    assert done.exit_code == 0, done.output
    counted = done.output.partition("how often which number")[2].splitlines()
    assert counted[2].split() == ["number", "full", "h2o", "200", "ahakv", "200", "ahakv:gain=multiply", "200"]
    said = [line.split() for line in counted[4:] if line.strip() and "comparison.csv" not in line]
    assert [sum(int(line[column]) for line in said) for column in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_figures_are_listed_beside_tables_and_say_if_they_have_no_numbers(monkeypatch):
    shown = {}
    monkeypatch.setattr(command.show, "print_table", lambda head, rows: shown.update({row[0]: row[1] for row in rows}))
    command.print_names()
    assert shown["protokv/figure8"] == shown["protokv/table2"] == "scores"
    assert shown["protokv/figure10"] == "scores, none printed"
    assert shown["ahakv/figure8"] == shown["intentkv/figure9"] == "measured by a script"
