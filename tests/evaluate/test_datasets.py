"""Data from the hub: rows as they are there become the files our readers know. Nothing here touches the network."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

from kvkeep.errors import BadInput, MissingExtra, UnknownName
from kvkeep.evaluate.datasets import SOURCES, data_folder, fetch
from kvkeep.evaluate.suite import Sources, load

LETTERS = {"text": ["in a cup", "in the sun", "in a box", "at night"], "label": ["A", "B", "C", "D"]}
WORDS = {"word": "class", "sentence1": "A class.", "sentence2": "Real class.", "start1": 2, "start2": 5, "end1": 7}
PROBLEM = {"problem": "What is $1 + 1$?", "solution": "It is $\\boxed{2}$.", "answer": "2"}
ROWS = {  # (as the hub has it, as the official file has it)
    "arc_easy": ({"id": "M_1", "question": "Where does ice melt?", "choices": LETTERS, "answerKey": "B"},) * 2,
    "openbookqa": ({"id": "7-5", "question_stem": "Ice melts", "choices": LETTERS, "answerKey": "B"},) * 2,
    "wic": (
        {**WORDS, "end2": 10, "idx": 3, "label": 0},
        {**WORDS, "end2": 10, "idx": 3, "label": "false", "version": 1.1},
    ),
    "winogrande": ({"sentence": "Ann met Bo and _ left.", "option1": "Ann", "option2": "Bo", "answer": "2"},) * 2,
    "math500": (
        {**PROBLEM, "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"},
        {"problem": "What is $1 + 1$?", "answer": "2", "unique_id": "test/algebra/1.json"},
    ),
    "aime24": (
        {"id": 60, **PROBLEM, "answer": "204", "url": "https://…", "year": "2024"},
        {"id": 60, **PROBLEM, "answer": 204},
    ),
    "aime25": ({"problem": "What is $1 + 1$?", "answer": "70", "id": "0"},) * 2,
}
LONG = {
    "input": "Who wrote it?", "context": "Ünal wrote it.\u2028All of it.", "answers": ["Ünal"], "length": 6,
    "dataset": "qasper", "language": "en", "all_classes": None, "_id": "0a",
}  # fmt: skip
INFINITE = {"id": 0, "context": "A page. " * 3, "input": "What is the pass key?", "answer": ["71432"]}


class Words:
    chat_template = eos_token_id = None


def read(name: str, folder: Path):
    samples, skipped = load([name], Words(), Sources(data=folder))
    assert not skipped
    return samples


def write(path: Path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A hub on this machine; -> what it was asked for."""
    from datasets import Dataset

    seen = []
    tables = {SOURCES.get(name, SOURCES.get(f"short/{name}")).repo: hub for name, (hub, _) in ROWS.items()}

    def load_dataset(path, name=None, *, split):
        seen.append((path, name, split))
        return Dataset.from_list([tables[path]])

    def hf_hub_download(repo_id, filename, *, repo_type):
        seen.append((repo_id, filename, repo_type))
        if filename != "data.zip":
            return str(write(tmp_path / "hub" / filename, INFINITE))
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            archive.writestr("data/qasper.jsonl", json.dumps(LONG, ensure_ascii=False) + "\n")
        return str(tmp_path / "data.zip")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    return seen


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_hub_are_read_as_the_official_file_is(name, asked, tmp_path):
    said = []
    path = fetch(name, tmp_path / "ours", said.append)
    source = SOURCES.get(name) or SOURCES[f"short/{name}"]
    assert asked == [(source.repo, source.config, source.split)]
    assert said == [f"fetching {name} from {source.repo} (once)"]
    write(tmp_path / "official" / f"{name}.jsonl", ROWS[name][1])
    found = read(name, tmp_path / "ours")
    assert found == read(name, tmp_path / "official") and len(found) == 1
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("name", "record"), [("longbench/qasper", LONG), ("infinitebench/passkey", INFINITE)])
def test_files_of_the_hub_are_taken_as_they_are(name, record, asked, tmp_path):
    path = fetch(name, tmp_path / "ours")
    assert path == tmp_path / "ours" / f"{name}.jsonl" and json.loads(path.read_text(encoding="utf-8")) == record
    write(tmp_path / "official" / f"{name}.jsonl", record)
    assert read(name, tmp_path / "ours") == read(name, tmp_path / "official")
    assert read(name.partition("/")[0], tmp_path / "ours")  # the group finds it too


def test_what_is_there_is_never_fetched_again(asked, tmp_path):
    first = fetch("wic", tmp_path)
    before = first.stat().st_mtime_ns
    assert fetch("wic", tmp_path) == first and len(asked) == 1 and first.stat().st_mtime_ns == before


def test_a_table_that_breaks_off_leaves_nothing(asked, tmp_path, monkeypatch):
    def broken(*_, **__):
        yield ROWS["wic"][0]
        raise ConnectionError("connection reset\nby peer")

    monkeypatch.setattr("datasets.load_dataset", broken)
    with pytest.raises(BadInput) as caught:
        fetch("wic", tmp_path)
    assert "'wic' could not be fetched from the dataset aps/super_glue (connection reset)" in str(caught.value)
    assert "--data DIR" in str(caught.value) and "\n" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".partial")]


def test_a_hub_out_of_reach_or_changed_is_named(asked, tmp_path, monkeypatch):
    def away(*_, **__):
        raise OSError

    with pytest.raises(BadInput, match=r"zai-org/LongBench \(.*no item named 'data/trec.jsonl'.*--data DIR"):
        fetch("longbench/trec", tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", away)
    with pytest.raises(BadInput, match=r"xinrongzhang2022/InfiniteBench \(OSError\); check the network"):
        fetch("infinitebench/passkey", tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_without_datasets_the_way_to_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"allenai/ai2_arc .* pip install 'kvkeep\[eval\]'"):
        fetch("arc_easy", tmp_path)


def test_a_name_the_hub_does_not_have(tmp_path):
    with pytest.raises(UnknownName, match=r"no task 'longbench/qaspar'.*Did you mean 'longbench/qasper'"):
        fetch("longbench/qaspar", tmp_path)


def test_data_is_kept_beside_the_models(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "data" and fetch("aime25") == tmp_path / "data" / "aime25.jsonl"


def test_every_task_that_is_read_from_a_file_can_be_fetched():
    from kvkeep.evaluate.suite import READ, SHORT

    assert {f"short/{name}" for name in SHORT} | set(READ) - {"aime", *SHORT} <= set(SOURCES)
    assert len([name for name in SOURCES if name.startswith("longbench/") and not name.endswith("_e")]) == 21
    assert len([name for name in SOURCES if name.startswith("infinitebench/")]) == 12
