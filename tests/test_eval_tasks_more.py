"""What a table of scores must tell apart, tasks that are made to measure, and seeds that count."""

import csv
import hashlib
import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import tiny_chat
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.cli.show import print_scores
from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate import suite, summary
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.metrics.longbench import RANGES, averages, length_range, score_answer
from kvkeep.evaluate.prompt import build_prompt
from kvkeep.evaluate.recipes import compare
from kvkeep.evaluate.recipes.recipe import recipe, shrink
from kvkeep.evaluate.suite import Sources, load
from kvkeep.evaluate.tasks import infinitebench
from kvkeep.evaluate.tasks.needle import DEPTHS
from kvkeep.evaluate.tasks.ruler import TASKS as RULER
from kvkeep.evaluate.tasks.ruler import vocabulary
from kvkeep.model.load import load_tokenizer

HERE = Path(__file__).parent
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


# --- LongBench-E ---


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


# --- InfiniteBench's tasks that need no file ---


def taken(tokenizer, sample, protocol, window):
    prompt = build_prompt(tokenizer, sample, protocol, window)
    assert prompt.cut == 0
    return prompt.tokens + sample.max_new_tokens


@pytest.mark.parametrize("kind", ["bytes", pytest.param("default", marks=pytest.mark.real)])
@pytest.mark.parametrize("task", infinitebench.MADE)
def test_made_prompts_fill_their_length_to_the_last_line(task, kind):
    tokenizer = tiny_chat.tokenizer() if kind == "bytes" else load_tokenizer("default")
    unit = infinitebench.NOISE if task in infinitebench.IN_NOISE else ", " + '"' + "0" * 36 + '": "' + "0" * 36 + '"'
    each = len(tokenizer(unit, add_special_tokens=False).input_ids)
    for length in (1024, 2048):
        for sample in infinitebench.sized(task, length, tokenizer, 4):
            for protocol in ("agnostic", "aware"):
                assert 0 <= length - taken(tokenizer, sample, protocol, length) < each


def test_a_question_read_by_itself_has_room():
    """The sign before it and the line's end are one token, unless they are read apart."""
    words = Tokenizer(models.BPE(vocab={**tiny_chat.tokenizer().get_vocab(), ".Ċ": 258}, merges=[(".", "Ċ")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    for length in range(1000, 1000 + len(infinitebench.NOISE)):
        (sample,) = infinitebench.sized("passkey", length, tokenizer, 1)
        assert taken(tokenizer, sample, "aware", length) < taken(tokenizer, sample, "agnostic", length) <= length


@pytest.mark.parametrize("task", infinitebench.MADE)
def test_made_tasks_are_asked_for_by_name(task):
    made, skipped = load([task], tiny_chat.tokenizer(), Sources(lengths=(1024, 2048)))
    assert task in suite.names() and not skipped
    assert Counter(sample.task for sample in made) == {f"{task}_{n}": len(DEPTHS) for n in (1024, 2048)}
    assert len({sample.id for sample in made}) == len(made)
    assert len({sample.references for sample in made}) == len(made)
    for sample in made:
        (answer,) = sample.references
        assert METRICS[sample.metric](f" {answer}.", list(sample.references), **sample.extra) == 1.0
        assert METRICS[sample.metric](" 1.", list(sample.references), **sample.extra) == 0.0
        assert (sample.extra["length"], sample.extra["seed"]) == (int(sample.task.rpartition("_")[2]), 42)


def place(sample):
    """Where the answer is first said, in percent of the context without its frame."""
    start, end = (sample.context.index(part) for part in ("{", "}")) if "{" in sample.context else (0, None)
    text = sample.context[start:end]
    return 100 * text.index(sample.references[0]) / len(text)


@pytest.mark.parametrize("task", infinitebench.MADE)
def test_places_are_spread_evenly_and_named(task):
    for count, depths in ((1, [50.0]), (3, [16.7, 50.0, 83.3]), (4, [12.5, 37.5, 62.5, 87.5])):
        made, _ = load([task], tiny_chat.tokenizer(), Sources(lengths=(4096,), limit=count))
        assert [sample.extra["depth"] for sample in made] == depths
        assert [place(sample) for sample in made] == pytest.approx(depths, abs=4)


@pytest.mark.parametrize("task", infinitebench.MADE)
def test_a_seed_draws_what_is_hidden(task):
    first, again, other = (
        load([task], tiny_chat.tokenizer(), Sources(lengths=(1024,), limit=3, seed=seed))[0] for seed in (42, 42, 7)
    )
    assert first == again and {sample.extra["seed"] for sample in other} == {7}
    assert not {sample.references for sample in first} & {sample.references for sample in other}


@pytest.mark.parametrize("task", infinitebench.MADE)
def test_few_long_texts_are_counted(task, monkeypatch):
    counted, tokens = [], infinitebench._tokens

    def count(tokenizer, sample):
        counted.append(tokens(tokenizer, sample))
        return counted[-1]

    monkeypatch.setattr(infinitebench, "_tokens", count)
    infinitebench.sized(task, 20000, tiny_chat.tokenizer(), 2)
    assert sum(taken > 10000 for taken in counted) <= 2 * 4


def test_a_length_without_room_is_refused():
    for task in infinitebench.MADE:
        with pytest.raises(BadParameter, match=f"length=200 cannot hold {task}: it takes [3-6][0-9][0-9] tokens"):
            infinitebench.sized(task, 200, tiny_chat.tokenizer(), 1)
    with pytest.raises(BadParameter, match="count=0"):
        infinitebench.sized("passkey", 2048, tiny_chat.tokenizer(), 0)


@pytest.mark.usefixtures("tiny")
def test_eval_makes_them(tmp_path):
    args = ("--tasks", ",".join(infinitebench.MADE), "--length", 1000, "--limit", 2, "--seed", 5)
    said, rows, results = evaluate(tmp_path, *args, "--protocol", "aware")
    assert [each["task"] for each in results] == [f"{task}_1000" for task in infinitebench.MADE]
    assert {each["truncated"] for each in rows} == {0} and "passkey_1000" in said
    assert {json.dumps(each["made"], sort_keys=True) for each in rows} == {
        json.dumps({"depth": depth, "length": 1000, "seed": 5}, sort_keys=True) for depth in (25.0, 75.0)
    }


@pytest.mark.parametrize("name", ["intentkv/table2", "actqkv/table2"])
def test_small_recipes_answer_the_tasks_of_the_paper(name):
    whole, small = recipe(name), shrink(recipe(name))
    assert len(small.columns) == 3
    for column in small.columns:
        ((task, length),) = column.points
        assert whole.column(column.name).points == ((f"infinitebench/{task}", None),)
        assert compare.row_name((task, length)) == f"{task}_{length}"
        for cell in (cell for cell in small.cells if cell.column == column.name):
            theirs = whole.spec(next(each for each in whole.cells if each.label == cell.label), f"infinitebench/{task}")
            assert small.spec(cell, task) == recipe(name).small.get("methods", {}).get(theirs, theirs)


# --- seeds of needles ---


def numbers(seed):
    made, _ = load(["needle_number"], tiny_chat.tokenizer(), Sources(lengths=(1024,), seed=seed))
    return made


def test_a_seed_decides_the_numbers_that_are_hidden():
    first, other = numbers(42), numbers(43)
    assert first == numbers(42) and {sample.extra["seed"] for sample in other} == {43}
    for one, two in zip(first, other, strict=True):
        assert one.references != two.references and two.references[0] in two.context
        assert one.context.replace(one.references[0], two.references[0]) == two.context


@pytest.mark.parametrize("name, digest", [("needle", "d4ba5374edf024ed"), ("needle_number", "42a63f11417a0ccb")])
def test_at_the_default_seed_needles_are_those_of_published_tables(name, digest):
    made, _ = load([name], tiny_chat.tokenizer(), Sources(lengths=(1024, 4096)))
    texts = [(each.task, each.id, each.context, each.question, each.references, each.prefix) for each in made]
    assert hashlib.sha256("".join(map(repr, texts)).encode()).hexdigest()[:16] == digest


def test_a_sandwich_has_no_seed():
    first, other = (load(["needle"], tiny_chat.tokenizer(), Sources(seed=seed))[0] for seed in (42, 43))
    assert first == other and "seed" not in first[0].extra


# --- files ---


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full to write to")
def test_a_full_disk_is_named():
    lines = compare.compare(shrink(recipe("protokv/figure9")), {})
    for write in (lambda: summary.write_csv([row("t", 1.0)], FULL), lambda: compare.write_csv(lines, FULL)):
        with pytest.raises(BadInput, match="'/dev/full' cannot be written .No space left on device.; the rows .* safe"):
            write()


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(BadInput, match="results.csv' cannot be written .No such file"):
        summary.write_csv([row("t", 1.0)], tmp_path / "gone" / "results.csv")


# --- averages and normalised choices ---


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


# --- packages ---


def test_the_words_of_ruler_are_pinned():
    extras = (HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"wonderwords=={vocabulary.OFFICIAL}"' in extras
