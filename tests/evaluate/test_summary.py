"""What a table of scores must tell apart: ranges of length, averages, normalised scores."""

import csv
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import tiny_chat
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.cli.show import print_scores
from kvkeep.evaluate import summary
from kvkeep.evaluate.metrics.longbench import RANGES, averages, length_range, score_answer
from kvkeep.evaluate.tasks.ruler import TASKS as RULER

HERE = Path(__file__).parents[1]
BY_LENGTH = json.loads((HERE / "golden" / "longbench_scorer_public.json").read_text(encoding="utf-8"))["rows"]


def row(task, score, **changes):
    place = {"task": task, "protocol": "aware", "method": "full", "budget": None, "score": score}
    facts = {"metric": "longbench", "kept_per_head": 4.0, "bytes": 10, "full_bytes": 100, "truncated": 0}
    return {**place, **facts, **changes}


def in_words(task, score, words):
    return row(task, score, made={"length": words})


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("kvkeep.model.load.load", lambda *_, **__: (tiny_chat.model(), tiny_chat.tokenizer()))
    monkeypatch.setattr("kvkeep.model.load.load_tokenizer", lambda *_: tiny_chat.tokenizer())


def evaluate(out, *args):
    done = CliRunner().invoke(app, ["eval", "--methods", "full", "--out", str(out), *map(str, args)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    with (out / "results.csv").open() as file:
        return done.stdout, rows, list(csv.DictReader(file))


@pytest.mark.parametrize("golden", BY_LENGTH, ids=lambda golden: golden["id"])
def test_cells_of_longbench_e_are_the_official_ranges(golden):
    name, classes = golden["dataset"], golden["all_classes"]
    parts = zip(golden["predictions"], golden["references"], golden["lengths"], strict=True)
    rows = [in_words(f"{name}_e", score_answer(said, right, name, classes), words) for said, right, words in parts]
    found = {cell.task: round(cell.score, 2) for cell in summary.summarize(rows)}
    assert found == {f"{name}_e {part}": score for part, score in golden["expected_by_length"].items()}


def test_ranges_end_where_the_next_begins_and_keep_their_order():
    lengths = [8000, 7999, 4000, 3999, 0]
    assert [length_range(words) for words in lengths] == ["8k+", "4-8k", "4-8k", "0-4k", "0-4k"]
    found = summary.summarize([in_words("qasper_e", words / 8000, words) for words in lengths])
    assert [(cell.task, cell.n) for cell in found] == [("qasper_e 0-4k", 2), ("qasper_e 4-8k", 2), ("qasper_e 8k+", 1)]


def test_only_longbench_e_is_split():
    rows = [in_words("qasper", 1.0, 100), in_words("qasper", 0.0, 9000), row("lcc_e", 1.0)]
    assert [(cell.task, cell.n) for cell in summary.summarize(rows)] == [("qasper", 2), ("lcc_e", 1)]


def test_ranges_are_averaged_apart(capsys, monkeypatch):
    rows = [in_words("qasper_e", 0.2, 10), in_words("hotpotqa_e", 0.4, 10), in_words("2wikimqa_e", 0.6, 10)]
    rows += [in_words("qasper_e", 1.0, 9000), in_words("hotpotqa_e", 0.5, 9000), in_words("qasper_e", 0.0, 5000)]
    monkeypatch.setenv("COLUMNS", "100")
    print_scores(rows)
    said = capsys.readouterr().out
    assert re.search(r"qasper_e 0-4k +full +– +20\.0 .* n=1", said)
    assert re.search(r"LongBench-E 0-4k, mean of 3 tasks +full +– +40\.0", said)
    assert re.search(r"LongBench-E 0-4k, mean of 2 categories +full +– +35\.0", said)
    assert re.search(r"LongBench-E 8k\+, mean of 2 tasks +full +– +75\.0", said)
    assert "LongBench-E 4-8k" not in said and "LongBench-E," not in said
    whole = averages({"qasper": 1.0, "lcc": 3.0, **{f"qasper_e {part}": 9.0 for part in RANGES}})
    assert whole == {"LongBench, mean of 2 tasks": 2.0, "LongBench, mean of 2 categories": 2.0}


@pytest.mark.usefixtures("tiny")
def test_a_run_of_longbench_e_is_reported_by_length(tmp_path):
    (tmp_path / "longbench").mkdir()
    line = {"context": "Four geese flew south.", "answers": ["four"], "dataset": "qasper", "input": "How many?"}
    lines = [json.dumps({**line, "length": words, "_id": str(words)}) for words in (9000, 100, 200)]
    (tmp_path / "longbench" / "qasper_e.jsonl").write_text("\n".join(lines))
    args = ("--tasks", "longbench/qasper_e", "--data", tmp_path, "--protocol", "aware")
    said, _, results = evaluate(tmp_path / "out", *args)
    assert [(each["task"], each["n"]) for each in results] == [("qasper_e 0-4k", "2"), ("qasper_e 8k+", "1")]
    assert "qasper_e 0-4k" in said and "qasper_e 8k+" in said


def test_ruler_is_averaged_by_length_over_the_tasks_there_are(capsys, monkeypatch):
    percent = {"metric": "ruler_string_match_all"}
    rows = [row(f"{task}_4096", 10.0 * number, **percent) for number, task in enumerate(list(RULER)[:11])]
    rows += [row("qa_1_8192", 30.0, **percent), row("qa_2_8192", 50.0, **percent), row("vt_16384", 90.0, **percent)]
    monkeypatch.setenv("COLUMNS", "100")
    print_scores(rows)
    said = capsys.readouterr().out
    assert re.search(r"RULER 4096 \(11 tasks\) +full +– +50\.0", said)
    assert re.search(r"RULER 8192 \(2 tasks\) +full +– +40\.0", said)
    assert "RULER 16384" not in said
    assert summary.means({"passkey_4096": 1.0, "kv_retrieval_4096": 2.0, "needle_number": 3.0}) == {}


def test_choices_are_also_given_by_character(capsys, monkeypatch, tmp_path):
    rows = [row("wic", score, score_per_character=other) for score, other in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0))]
    chosen, written = summary.summarize([*rows, row("qasper", 1.0)])
    assert chosen.score_per_character == pytest.approx(100 / 3) and written.score_per_character is None
    monkeypatch.setenv("COLUMNS", "200")
    print_scores([*rows, row("qasper", 1.0)])
    said = capsys.readouterr().out
    assert "33.3 [6, 79] n=3, per character 33.3" in said and said.count("per character") == 1
    summary.write_csv([*rows, row("qasper", 1.0)], tmp_path / "results.csv")
    with (tmp_path / "results.csv").open() as file:
        found = [each["score_per_character"] for each in csv.DictReader(file)]
    assert found[0].startswith("33.3") and found[1] == ""
    assert [field.name for field in fields(summary.Cell)][-1] == "score_per_character"
