"""Rows on disk: whole, once, of one run, and refused where they contradict each other."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny_chat

from kvkeep.errors import BadInput
from kvkeep.evaluate import grid as running
from kvkeep.evaluate import summary
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.recipes import compare as comparison
from kvkeep.evaluate.recipes.recipe import recipe, shrink
from kvkeep.evaluate.results import Results, exclusive_lock
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.worker import Worker

CONTEXT = "".join(chr(97 + i * i % 23) + (". " if i % 31 == 0 else "") for i in range(700))
BUDGET = 64


def sample(number=0, **changes):
    made = Sample("toy", str(number), f" What is {number}?", ("x",), "longbench_qa_f1", CONTEXT, " It is")
    return replace(made, **{"max_new_tokens": 6, **changes})


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.model(), tiny_chat.tokenizer()


def test_answers_are_on_disk_before_the_next_question(chat, tmp_path):
    grid = Grid(("full", "snapkv"), (BUDGET,), ("agnostic",))
    asked = [sample(0), sample(1, question=" Why?" * 300), sample(2)]
    with pytest.raises(BadInput, match="toy '1': question and answer take"):
        run(Worker(*chat, grid.configs), asked, grid, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["id"], row["method"]) for row in rows] == [("0", "full"), ("0", "snapkv")]


def test_rows_of_other_packages_are_refused(chat, tmp_path, monkeypatch):
    grid = Grid(("full",), (), ("aware",))
    (row,) = run(Worker(*chat, grid.configs), [sample()], grid, tmp_path)
    assert row["packages"]["code_sim"] == "difflib"
    monkeypatch.setattr(running, "versions", lambda: row["packages"] | {"torch": "9.9"})
    with pytest.raises(BadInput, match="of another run .packages .*'9.9'"):
        run(Worker(*chat, grid.configs), [sample()], grid, tmp_path)


def test_rows_say_how_their_sample_was_made(chat, tmp_path):
    grid, made = Grid(("full",), (), ("aware",)), {"splitter": "plain", "asked": 4096, "capped": True}
    (row,) = run(Worker(*chat, grid.configs), [sample(extra=made)], grid, tmp_path)
    assert row["made"] == made


HOLDING = """
import sys, time
from kvkeep.evaluate.results import exclusive_lock
with exclusive_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""
SECOND = """
import sys
from kvkeep.cli.app import main
sys.argv = ["kvkeep", "eval", "--tasks", "niah_single_1", "--out", sys.argv[1]]
main()
"""


def held_by_another(out):
    process = subprocess.Popen([sys.executable, "-c", HOLDING, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_another_run_writes_to_is_refused_until_that_one_is_dead(tmp_path):
    """Even one that was killed with -9 blocks nobody."""
    process = held_by_another(tmp_path / "out")
    try:
        second = subprocess.run([sys.executable, "-c", SECOND, str(tmp_path / "out")], capture_output=True, text=True)
        told = " ".join(second.stderr.split())
        assert second.returncode == 2 and f"process {process.pid} on" in told and "another run" in told
        with (
            pytest.raises(BadInput, match=rf"another run \(process {process.pid} on .*\); wait for it"),
            exclusive_lock(tmp_path / "out"),
        ):
            pass
    finally:
        process.kill()
        process.communicate()
    with exclusive_lock(tmp_path / "out"):
        assert str(os.getpid()) in (tmp_path / "out" / ".lock").read_text()


def doubled(**changes):
    row = {"task": "toy", "id": "0", "protocol": "aware", "method": "full", "budget": None, "score": 1.0}
    return json.dumps({**row, **changes}, sort_keys=True) + "\n"


def test_rows_that_are_there_twice_are_merged_if_they_say_the_same(tmp_path):
    path, times = tmp_path / "rows.jsonl", tmp_path / "times.jsonl"
    path.write_text(doubled() + doubled(id="1") + doubled() + doubled(id="1"))
    assert [row["id"] for row in Results(path).rows] == ["0", "1"]
    assert path.read_text() == doubled() + doubled(id="1") and os.listdir(tmp_path) == ["rows.jsonl"]
    times.write_text(doubled(seconds=1) + doubled(seconds=2))
    assert [row["seconds"] for row in Results(times, timed=True).rows] == [1]


def test_rows_that_contradict_each_other_are_refused_with_the_way_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    written = doubled(id="1") + doubled() + doubled(score=0.0)
    path.write_text(written)
    with pytest.raises(BadInput, match=r"toy '0' twice with different outcomes \(lines 2 and 3\).*delete both"):
        Results(path)
    assert path.read_text() == written


def row(task, score, **changes):
    place = {"task": task, "protocol": "aware", "method": "full", "budget": None, "score": score}
    facts = {"metric": "longbench", "kept_per_head": 4.0, "bytes": 10, "full_bytes": 100, "truncated": 0}
    return {**place, **facts, **changes}


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full to write to")
def test_a_full_disk_is_named():
    lines = comparison.compare(shrink(recipe("protokv/figure9")), {})
    compared = partial(summary.write_lines, comparison.Line, lines, FULL)
    for write in (lambda: summary.write_csv([row("t", 1.0)], FULL), compared):
        with pytest.raises(BadInput, match="'/dev/full' cannot be written .No space left on device.; the rows .* safe"):
            write()


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(BadInput, match="results.csv' cannot be written .No such file"):
        summary.write_csv([row("t", 1.0)], tmp_path / "gone" / "results.csv")
