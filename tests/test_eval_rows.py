"""What rows say: memory when an answer is written, what they were made with, and how far a prompt was read."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING

import kvkeep
from kvkeep.cli import eval as command
from kvkeep.cli.reproduce import Options, _eval_options
from kvkeep.cli.show import remarks
from kvkeep.compress.parse import parse
from kvkeep.engine.independent_batch import IndependentBatch
from kvkeep.errors import BadInput, NoData
from kvkeep.evaluate import grid as running
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.multiple_choice import loglikelihoods
from kvkeep.evaluate.prompt import answerable, build_prompt
from kvkeep.evaluate.recipes.jobs import jobs
from kvkeep.evaluate.recipes.recipe import recipe
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


@pytest.fixture(scope="module")
def narrow():
    """A model whose window is a quarter of the text."""
    return tiny_chat.model(256), tiny_chat.tokenizer()


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
@pytest.mark.parametrize("share", [True, False])
def test_what_is_fetched_is_held(chat, tmp_path, protocol, share):
    """A method that reads a text whole and fetches when it is asked holds its budget then, not before."""
    grid = Grid(tuple(RETRIEVING), (BUDGET,), (protocol,))
    for row in run(Worker(*chat, grid.configs, share), [sample()], grid, tmp_path):
        assert 0.5 * BUDGET < row["kept_per_head"] <= BUDGET, row["method"]
        tokens = row["prompt_tokens"] + row["new_tokens"] - 1  # the last is not read any more
        assert row["bytes"] == pytest.approx(row["kept_per_head"] / tokens * row["full_bytes"]), row["method"]
        assert row["peak_bytes"] >= row["bytes"] and row["device"] == "cpu"


def test_choices_are_weighed_from_what_is_fetched(chat, tmp_path):
    grid = Grid(("quest", "snapkv"), (BUDGET,), ("agnostic",))
    asked = Sample(
        "pick", "0", "Which?", (" no",), "lm_eval_multiple_choice", context=CONTEXT, choices=(" yes", " no, it is not"),
        chat=False, extra={"gold": 1, "choices": ("yes", "no")},
    )  # fmt: skip
    fetching, dropping = run(Worker(*chat, grid.configs), [asked], grid, tmp_path)
    assert dropping["kept_per_head"] == BUDGET >= fetching["kept_per_head"] > BUDGET / 2


@pytest.mark.parametrize("spec", RETRIEVING)
def test_choices_are_weighed_as_they_would_be_written(spec):
    model, words = tiny_chat.sharp()
    engine = kvkeep.Engine(model, words, spec, BUDGET)
    after = engine.prefill(torch.tensor(words(CONTEXT).input_ids))
    question, ids = (torch.tensor(words(text).input_ids) for text in ("Which?", " no, it is not"))
    weighed = loglikelihoods(IndependentBatch(model, [engine.sequence.fork()]), after[None], question, ids)
    logits, want = engine.extend(question)[-1], 0.0
    for token in ids:
        want += float(logits.log_softmax(-1)[token])
        logits = engine.extend(token[None])[-1]
    assert weighed == [pytest.approx(want, abs=1e-4)]


@pytest.mark.parametrize("spec", RETRIEVING)
@pytest.mark.parametrize("more", [0, 3, 17])
def test_a_prompt_ends_within_the_budget(chat, spec, more):
    one = kvkeep.Engine(*chat, spec, 96, prefill_chunk_size=128)
    one.prefill(torch.tensor(chat[1](CONTEXT[: 500 + more]).input_ids))
    assert one.cache.report().kept_per_head <= 96


@pytest.mark.parametrize("new, passes", [(1, None), (2, 1), (9, 8)])
def test_the_first_token_is_not_written(chat, tmp_path, new, passes):
    """The reading predicts it; speed is that of the passes that follow."""
    grid = Grid(("full",), (), ("aware",))
    run(Worker(*chat, grid.configs), [sample(max_new_tokens=new)], grid, tmp_path)
    (times,) = map(json.loads, (tmp_path / "times.jsonl").read_text().splitlines())
    writing = times["answer_s"] + times["prefill_s"] - times["first_token_s"]
    assert times["tokens_per_s"] == (passes and pytest.approx(passes / writing, rel=1e-6))


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


# beyond the window


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_only_who_can_reads_beyond_the_window(narrow, tmp_path, protocol):
    names = tuple(name for name in [*EVICTING, *RETRIEVING] if name != "full")
    grid = Grid(("full", *names), (BUDGET,), (protocol,))
    for beyond in (False, True):
        rows = run(Worker(*narrow, grid.configs, beyond_window=beyond), [sample()], grid, tmp_path / str(beyond))
        for row in rows:
            far = beyond and parse(row["method"]).extends_context
            assert (row["truncated"] == 0) == far, row["method"]
            assert (row["prompt_tokens"] > 256) == far, row["method"]
            assert row["method"] == "full" or row["kept_per_head"] <= BUDGET, row["method"]
    assert {row["method"] for row in rows if not row["truncated"]} >= {"actqkv", "infllm", "streamingllm", "intelllm"}


@pytest.mark.parametrize("spec", ["streamingllm", "intelllm", "lm_infinite", "infllm"])
def test_what_is_read_beyond_the_window_is_answered_as_an_engine_does(narrow, tmp_path, spec):
    model, words = narrow
    grid = Grid((spec,), (BUDGET,), ("aware",))
    (row,) = run(Worker(*narrow, grid.configs, beyond_window=True), [sample()], grid, tmp_path)
    engine = kvkeep.Engine(model, words, spec, BUDGET, schedule=None if parse(spec).retrieval else "prompt")
    logits, ids = engine.prefill(build_prompt(words, sample(), "aware", 2**31).context), []
    while len(ids) < 6 and int(logits.argmax()) != words.eos_token_id:
        ids.append(int(logits.argmax()))
        logits = engine.extend(torch.tensor(ids[-1:]))[-1]
    assert row["answer"] == words.decode(ids, skip_special_tokens=True)


def test_who_could_not_read_on_is_named(narrow, tmp_path):
    grid = Grid(("full", "snapkv", "infllm"), (BUDGET,), ("aware",))
    for beyond, whom in ((True, " for full, snapkv"), (False, "")):
        rows = run(Worker(*narrow, grid.configs, beyond_window=beyond), [sample()], grid, tmp_path / str(beyond))
        most = max(row["truncated"] for row in rows)
        assert remarks(rows)[0] == f"toy: 1 of 1 prompts were too long{whom} and lost up to {most} tokens"


def test_max_length_holds_beyond_the_window_too(narrow, tmp_path):
    grid = Grid(("infllm",), (BUDGET,), ("aware",))
    (row,) = run(Worker(*narrow, grid.configs, True, 400, beyond_window=True), [sample()], grid, tmp_path)
    assert row["prompt_tokens"] == 400 and row["truncated"] > 0


def test_recipes_of_methods_that_read_on_let_them():
    for name in ("actqkv/table1", "actqkv/table2", "actqkv/table3", "actqkv/table9", "intelllm/table1"):
        wanted = recipe(name)
        assert all(_eval_options(wanted, job, "x", Options()).beyond_window for job in jobs(wanted)), name
    assert not recipe("intentkv/table1").beyond_window


def test_the_flag_is_one_of_the_command(tmp_path):
    given = {"tasks": "needle", "out": str(tmp_path)}
    assert command.eval_options(None, given | {"beyond_window": True}).beyond_window
    assert not command.eval_options(None, given).beyond_window
    with pytest.raises(BadInput, match="beyond_window: 'yes' should be true or false"):
        command.eval_options(None, given | {"beyond_window": "yes"})


def test_answers_longer_than_the_window_are_left_out_by_name():
    long = sample(task="math_calc", max_new_tokens=30000)
    found, why = answerable([sample(), long], 8192)
    assert found == [sample()]
    assert why == {"math_calc": "may take 30,000 tokens to answer, and the model's context length is 8,192"}
    with pytest.raises(NoData, match="none of these tasks can be answered: math_calc may take 30,000"):
        answerable([long], 8192)


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
