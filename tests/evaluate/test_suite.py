"""Tasks by name: samples that are made to measure, seeds that count, data that is not there."""

import csv
import hashlib
import json
from collections import Counter

import pytest
import tiny_chat
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.errors import BadInput, BadParameter, NoData
from kvkeep.evaluate import suite
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.prompt import build_prompt
from kvkeep.evaluate.recipes.compare import row_name
from kvkeep.evaluate.suite import Sources, load
from kvkeep.evaluate.tasks import infinitebench
from kvkeep.evaluate.tasks.needle import DEPTHS
from kvkeep.model.load import load_tokenizer


def test_no_samples_at_all_is_no_data(tmp_path):
    with pytest.raises(NoData, match="none of these tasks can be had: math500 has no file"):
        load(["math500"], tiny_chat.tokenizer(), Sources(data=tmp_path))
    (tmp_path / "math500.jsonl").write_text("{]\n")
    with pytest.raises(BadInput) as caught:
        load(["math500"], tiny_chat.tokenizer(), Sources(data=tmp_path))
    assert not isinstance(caught.value, NoData)


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
