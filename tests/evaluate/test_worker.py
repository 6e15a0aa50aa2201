"""What rows say: memory when an answer is decoded, and how far a prompt was read."""

import json
from dataclasses import replace

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING

import kvkeep
from kvkeep.cli import eval as command
from kvkeep.cli.options import ReproduceOptions
from kvkeep.cli.reproduce import _eval_options
from kvkeep.cli.show import remarks
from kvkeep.compress.parse import parse
from kvkeep.errors import BadInput, NoData
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.prompt import answerable, build_prompt
from kvkeep.evaluate.recipes.recipe import jobs, recipe
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.worker import Worker, loglikelihoods

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
    weighed = loglikelihoods([engine.sequence.fork()], after[None], question, ids)
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
    for name in (*(f"actqkv/table{number}" for number in (1, 2, 3, 8, 9)), "intelllm/table1"):
        wanted = recipe(name)
        assert all(_eval_options(wanted, job, "x", ReproduceOptions()).beyond_window for job in jobs(wanted)), name
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


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_answers_are_evicted_from_as_each_method_does_if_asked(chat, tmp_path, protocol):
    """The same as a cache of the method's own schedule; who chooses once keeps the answer, as before."""
    grid = Grid(("full", "ahakv", "h2o", "snapkv"), (BUDGET,), (protocol,))
    asked = sample(max_new_tokens=20)
    found = {
        own: run(Worker(*chat, grid.configs, own_schedule=own), [asked], grid, tmp_path / str(own))
        for own in (False, True)
    }
    for before, after in zip(found[False], found[True], strict=True):
        evicts = after["method"] in ("ahakv", "h2o")
        assert after["schedule"] == (1 if evicts else None) and before["schedule"] is None
        assert (after["compressed"] == "decoding") == evicts
        if evicts:
            assert after["kept_per_head"] == BUDGET
        else:
            assert after == before
    if protocol == "aware":
        ids = build_prompt(chat[1], asked, protocol, 4096, None).context[None]
        cache = kvkeep.Cache(chat[0], "ahakv", BUDGET)
        out = chat[0].generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert chat[1].decode(out[0, ids.shape[1] :], skip_special_tokens=True) == found[True][1]["answer"]


def test_the_schedule_and_yarn_are_checked_before_anything_is_loaded():
    given = {"tasks": "passkey", "out": "x"}
    assert command.eval_options(None, given | {"yarn": 4}).yarn == 4.0
    with pytest.raises(BadInput, match="--yarn '4' is not a number"):
        command.eval_options(None, given | {"yarn": "4"})
    with pytest.raises(BadInput, match="--schedule 'often' is not known; use prompt or own"):
        command.check(command.eval_options(None, given | {"schedule": "often"}))
