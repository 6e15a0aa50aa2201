"""The grid: rows that can be trusted, whatever happened on the way."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING, make_llama

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import BadInput, BadParameter, CacheMisuse, KvkeepError
from kvkeep.evaluate.grid import Grid, items, run
from kvkeep.evaluate.prefill import prefill, prefill_shared
from kvkeep.evaluate.prompt import Prompt, build_prompt
from kvkeep.evaluate.results import KEY, Results
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.suite import Sources, load
from kvkeep.evaluate.summary import interval, summarize, write_csv
from kvkeep.evaluate.worker import Worker, _until_stop
from kvkeep.model.chat import eos_token_ids
from kvkeep.types import Observation

CONTEXT = "".join(chr(97 + i * i % 23) for i in range(300))
GRID = Grid(("full", "snapkv", "streamingllm"), (40, 0.5))


def sample(number=0, **changes):
    made = Sample("toy", str(number), f" What is {number}?", ("x",), "longbench_qa_f1", CONTEXT[number:], " It is")
    return replace(made, **{"max_new_tokens": 6, **changes})


def evaluate(chat, samples, grid, out, **how):
    return run(Worker(*chat, grid.configs, **how), samples, grid, out)


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.model(), tiny_chat.tokenizer()


@pytest.mark.core
@pytest.mark.parametrize("spec", [name for name in [*EVICTING, *RETRIEVING]])
def test_a_shared_reading_is_a_reading(chat, spec):
    model, words = chat
    ids = words(CONTEXT, return_tensors="pt").input_ids
    alone, together, other = (kvkeep.Cache(model, spec, 64) for _ in range(3))
    retrieves = together.method.retrieval  # a first pass that does not fit is not the model's attention
    if retrieves and not together.backend.fits(ids.shape[1]):
        with pytest.raises(CacheMisuse, match="cannot share|kvkeep.Engine"):
            prefill_shared(model, ids, [kvkeep.Cache(model, "full"), together])
        return
    try:
        want = model(ids, past_key_values=alone, logits_to_keep=1).logits[0, -1]
    except CacheMisuse as error:
        assert "kvkeep.Engine" in str(error)
        return
    assert prefill_shared(model, ids, [together, kvkeep.Cache(model, "h2o", 32), other]).equal(want)
    step = [model(torch.tensor([[7]]), past_key_values=each).logits for each in (alone, together, other)]
    assert step[0].equal(step[1]) and step[0].equal(step[2])
    assert alone.kept(1) == together.kept(1) == other.kept(1)


def test_caches_that_share_what_they_find_out_decide_as_alone():
    model, ids = make_llama(), torch.randint(0, 128, (1, 230), generator=torch.Generator().manual_seed(3))
    crossed = ["snapkv+adakv", "protokv:votes=softmax+adakv", "intentkv+adakv", "h2o+values", "snapkv:window=9"]
    one_pass = [name for name in EVICTING if not parse(name).needs_passes]  # others decide with passes of their own
    grid = [(spec, budget) for spec in [*one_pass, *crossed] for budget in (16, 20, 40, 150, 200)]
    alone, together = ([kvkeep.Cache(model, *cell, schedule="prompt") for cell in grid] for _ in range(2))
    for cache in alone:
        prefill_shared(model, ids, [cache])
    asked, memoize = [], Observation.memoize
    noting = lambda self, what, find: memoize(self, what, lambda: asked.append(what) or find())  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observation, "memoize", noting)
        prefill_shared(model, ids, together)
    for cell, a, b in zip(grid, alone, together, strict=True):
        assert all(a.kept(layer) == b.kept(layer) for layer in range(4)), cell
    shared = Counter(what for what in asked if what is not None)
    assert max(shared.values()) == 4 and shared.total() < 4 * len(grid) / 2  # each once in a layer


def test_sliding_layers_share_a_reading_too():
    from families import build, prompt

    model, ids = build("gemma3_text", "sdpa"), prompt(60)
    alone, together = (kvkeep.Cache(model, "snapkv", 16) for _ in range(2))
    want = model(ids, past_key_values=alone, logits_to_keep=1).logits[0, -1]
    assert prefill_shared(model, ids, [together]).equal(want)
    a, b = (model(ids[:, :1], past_key_values=each).logits for each in (alone, together))
    assert a.equal(b)


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_prompts_are_the_whole_text(chat, protocol):
    words = chat[1]
    made = build_prompt(words, sample(), protocol, 1024)
    whole = words.decode(torch.cat([made.context, made.question]))
    assert whole == f"<s>{CONTEXT} What is 0?</s><s> It is"
    assert (len(made.question) > 0) == (protocol == "agnostic") and (made.template, made.bos) == ("chat", 1)
    plain = build_prompt(words, sample(chat=False), protocol, 1024)
    assert words.decode(torch.cat([plain.context, plain.question])) == f"{CONTEXT} What is 0? It is"
    assert (plain.template, plain.bos) == ("plain", 0)
    marked = build_prompt(words, sample(context="####### " * 3 + CONTEXT), protocol, 1024)
    assert "#######" in words.decode(marked.context)


@pytest.mark.trap(21)
def test_a_context_too_long_loses_its_middle_and_the_row_says_so(chat):
    made = build_prompt(chat[1], sample(), "agnostic", 200)
    text = chat[1].decode(made.context)
    assert made.tokens + 6 == 200 and made.cut > 0
    assert text.startswith("<s>" + CONTEXT[:60]) and text.endswith(CONTEXT[-60:])
    with pytest.raises(BadInput, match="toy '0': question and answer take"):
        build_prompt(chat[1], sample(), "agnostic", 20)


def test_rows_say_what_a_score_cannot_be_compared_without(chat, tmp_path):
    rows = evaluate(chat, [sample(0), sample(1)], GRID, tmp_path)
    assert len(rows) == 2 * 2 * (1 + 2 + 2)
    assert {row["protocol"] for row in rows} == {"agnostic", "aware"}
    for row in rows:
        read = "context" if row["protocol"] == "agnostic" else "whole prompt"
        assert row["compressed"] == ("nothing" if row["method"] == "full" else read)
        assert row["bytes"] <= row["peak_bytes"] <= row["bytes"] + row["full_bytes"]
        if row["method"] == "full":
            assert row["budget"] is None and row["bytes"] == row["full_bytes"]
        else:
            assert row["kept_per_head"] <= (40 if row["budget"] == 40 else row["prompt_tokens"] / 2)
        assert 0 <= row["score"] <= 1 and row["bos"] == 1 and row["truncated"] == 0 and row["decoding"] == "greedy"
    times = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert len(times) == len(rows) and all(each["prefill_s"] > 0 for each in times)


def test_nothing_dropped_means_the_models_own_answer_under_both_protocols(chat, tmp_path):
    model, words = chat
    grid = Grid(("full", "snapkv", "h2o", "infllm", "quest"), (4000,))
    rows = evaluate(chat, [sample()], grid, tmp_path)
    ids = words(f"<s>{CONTEXT} What is 0?</s><s> It is", return_tensors="pt", add_special_tokens=False).input_ids
    want = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert {row["answer"] for row in rows} == {words.decode(want, skip_special_tokens=True)}


@pytest.mark.trap(21)
def test_a_stop_ends_an_answer(chat, tmp_path):
    (row,) = evaluate(chat, [sample()], Grid(("full",), (), ("aware",)), tmp_path / "a")
    stop = row["answer"][2]
    (cut,) = evaluate(chat, [sample(stops=(stop,))], Grid(("full",), (), ("aware",)), tmp_path / "b")
    assert cut["answer"] == row["answer"].split(stop)[0] and cut["new_tokens"] <= row["new_tokens"]


def test_a_stop_before_anything_is_said_does_not_count():
    for text, answer in {"\n four\nfive": "four", "\n": "\n", "six": "six"}.items():
        assert _until_stop(text, ("\n",)) == answer


KILLED = """
import sys, os, signal
sys.path[:0] = {tests!r}
import tiny_chat
from test_grid import GRID, evaluate, sample
from kvkeep.evaluate.results import KEY, Results
add = Results.add
def add_and_die(self, row):
    add(self, row)
    if self.path.name == "rows.jsonl" and len(self.rows) == {after}:
        os.kill(os.getpid(), signal.SIGKILL)
Results.add = add_and_die
evaluate((tiny_chat.model(), tiny_chat.tokenizer()), [sample(0), sample(1)], GRID, {out!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 11])
def test_a_killed_run_goes_on_and_ends_with_the_same_file(chat, tmp_path, after):
    samples = [sample(0), sample(1)]
    evaluate(chat, samples, GRID, tmp_path / "whole")
    out = tmp_path / "killed"
    code = textwrap.dedent(KILLED).format(tests=[str(p) for p in Path(__file__).parents[:2]], after=after, out=str(out))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len((out / "rows.jsonl").read_text().splitlines()) == after
    with (out / "rows.jsonl").open("a") as file:
        file.write('{"task": "toy", "id"')  # and the last line was torn
    evaluate(chat, samples, GRID, out)
    assert (out / "rows.jsonl").read_bytes() == (tmp_path / "whole" / "rows.jsonl").read_bytes()
    assert len((out / "times.jsonl").read_text().splitlines()) == 20


def test_what_cannot_be_is_named(chat, tmp_path):
    with pytest.raises(BadInput, match="toy has the id '0' twice"):
        evaluate(chat, [sample(), sample()], GRID, tmp_path)
    with pytest.raises(BadParameter, match="protocol 'blind' is not known"):
        Grid(("full",), (), ("blind",))
    with pytest.raises(KvkeepError, match="snapkw"):
        Grid(("snapkw",), (64,))
    with pytest.raises(BadParameter, match="budget=0"):
        Grid(("snapkv",), (0,))
    evaluate(chat, [sample()], Grid(("full",), (), ("aware",)), tmp_path / "a")
    with pytest.raises(BadInput, match="holds 1 rows that are not of this run"):
        evaluate(chat, [sample(1)], Grid(("full",), ()), tmp_path / "a")
    (tmp_path / "a" / "rows.jsonl").write_text("{]\n")
    with pytest.raises(BadInput, match="is damaged"):
        Results(tmp_path / "a" / "rows.jsonl")


def test_a_folder_of_another_run_is_left_as_it_is(chat, tmp_path):
    grid = Grid(("full", "full", "snapkv"), (40, 40), ("aware",))
    assert grid.configs == [("full", None), ("snapkv", 40)]  # what is asked for twice is done once
    evaluate(chat, [sample()], grid, tmp_path)
    before = (tmp_path / "rows.jsonl").read_bytes()
    with pytest.raises(BadInput, match="not of this run"):
        evaluate(chat, [sample(1)], grid, tmp_path)
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    with pytest.raises(BadInput, match="cannot be made a folder"):
        evaluate(chat, [sample()], grid, tmp_path / "rows.jsonl" / "deeper")


def test_rows_of_another_run_are_refused(chat, tmp_path):
    grid = Grid(("full",), (), ("aware",))
    answer, about = Worker(*chat, grid.configs), {"model": "tiny"}
    first = run(answer, [sample()], grid, tmp_path, about=about)
    assert first[0]["model"] == "tiny" and first[0]["packages"]["torch"] == torch.__version__.split("+")[0]
    with pytest.raises(BadInput, match="of another run .model 'tiny', here 'other'."):
        run(answer, [sample()], grid, tmp_path, about={"model": "other"})
    with pytest.raises(BadInput, match="of another run .sample "):  # another seed, or other data, has the same ids
        run(answer, [replace(sample(), context="Another text.")], grid, tmp_path, about=about)
    assert run(answer, [sample()], grid, tmp_path, about=about) == first


def test_long_answers_are_reported_when_they_are_written(chat, tmp_path):
    grid = Grid(("full", "h2o"), (40,), ("aware",))
    full, tight = evaluate(chat, [sample(long=True, max_new_tokens=120, metric="math")], grid, tmp_path)
    assert full["cut"] and not full["answered"] and full["new_tokens"] == 120
    assert full["kept_per_head"] == full["prompt_tokens"] + 119  # the last is not read any more
    assert tight["kept_per_head"] == 40 and tight["full_bytes"] == full["full_bytes"] > tight["bytes"]


def test_an_answer_that_has_to_speak_does(chat):
    """Would end at once, then begin a line, then say 7."""
    model, words = chat
    (end, *_), line = eos_token_ids(model, words), words("\n", add_special_tokens=False).input_ids[-1]
    worker, ids = Worker(model, words, [("full", None)]), torch.tensor([3, 4, 5])
    for non_empty, want in ((True, [70]), (False, [])):
        asked = sample(stops=("\n",), non_empty=non_empty, max_new_tokens=1)
        (context,) = prefill(model, words, ids, worker.methods, (), True)
        logits = torch.zeros_like(context.logits)
        logits[[end, line, 70]] = torch.tensor([3.0, 2.0, 1.0])
        prompt = Prompt(ids, ids[:0], "plain", 0, 0, "")
        ((_, found, _),) = worker._decode([replace(context, logits=logits)], prompt, asked)
        assert found == want


def choice(number=0, shots=""):
    offered = (" yes", " no", " perhaps")
    return Sample(
        "toy_choice", str(number), f"Is {number} odd?", (offered[1],), "lm_eval_multiple_choice", context=shots,
        choices=offered, chat=False, extra={"gold": 1, "choices": ("yes", "no", "perhaps")},
    )  # fmt: skip


@pytest.mark.parametrize("shots", ["", CONTEXT])
def test_choices_are_weighed_from_what_is_kept(chat, tmp_path, shots):
    model, words = chat
    rows = evaluate(chat, [choice(shots=shots)], Grid(("full", "snapkv"), (8, 4000)), tmp_path)
    for protocol in ("agnostic", "aware") if shots else ("aware",):
        full, tight, loose = (row for row in rows if row["protocol"] == protocol)
        assert loose["loglikelihoods"] == pytest.approx(full["loglikelihoods"], abs=1e-4)
        assert tight["loglikelihoods"] != pytest.approx(full["loglikelihoods"], abs=1e-4)
        assert tight["kept_per_head"] == 8
    assert len(rows) == (6 if shots else 3)  # without a context the question is always known
    want = []
    for text in (" yes", " no", " perhaps"):
        read = words(shots + "Is 0 odd?").input_ids
        ids = words(shots + "Is 0 odd?" + text, return_tensors="pt").input_ids
        chances = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        want.append(float(chances[len(read) - 1 :].sum()))
    assert rows[0]["loglikelihoods"] == pytest.approx(want, abs=1e-4)
    assert rows[0]["score"] == float(max(want) == want[1]) and rows[0]["answer"].strip() in ("yes", "no", "perhaps")


def test_problems_are_graded_in_the_grid(chat, tmp_path, monkeypatch):
    problems = [sample(0, metric="math", references=("2",)), sample(1, metric="aime", references=("033",))]
    monkeypatch.setattr("kvkeep.evaluate.worker._until_stop", lambda *_: "so \\boxed{\\frac{4}{2}}")
    right, wrong = evaluate(chat, problems, Grid(("full",), (), ("aware",)), tmp_path)
    assert (right["score"], wrong["score"]) == (1.0, 0.0)


def test_problems_have_room_and_ask_for_a_box(tmp_path):
    (tmp_path / "math500.jsonl").write_text(json.dumps({"problem": "What is 1 + 1?", "answer": "2"}))
    ((one,), skipped) = load(["math500"], tiny_chat.tokenizer(), Sources(data=tmp_path))
    assert "boxed" in one.question and one.max_new_tokens == 2048 and not skipped


def test_means_come_with_their_number_and_interval(tmp_path):
    def row(score, method="snapkv", **changes):
        facts = {"kept_per_head": 4.0, "bytes": 10, "full_bytes": 100, "truncated": 0, "metric": "longbench_qa_f1"}
        return {"task": "t", "protocol": "aware", "method": method, "budget": 4, "score": score, **facts, **changes}

    rows = [row(1.0), row(0.0), row(1.0, truncated=3), row(1.0), row(0.25, "h2o"), row(0.75, "h2o")]
    first, second = summarize(rows)
    assert (first.method, first.n, first.score, first.truncated) == ("snapkv", 4, 75.0, 1)
    assert (round(first.low, 1), round(first.high, 1)) == (30.1, 95.4)  # Wilson's interval of 3 in 4
    assert second.score == 50 and second.low == pytest.approx(9.5, abs=0.1)  # as of one in two
    highest = [interval([part] + [0.0] * 23)[1] for part in (0.0, 0.25, 1.0)]
    assert highest == sorted(highest)  # a higher mean never has a lower bound
    assert interval([0.5])[0] < 0.1 and interval([0.5])[1] > 0.9  # one sample says next to nothing
    (whole,) = summarize([row(100.0, metric="ruler_string_match_all")] * 2)
    assert (whole.score, whole.high) == (100.0, 100.0) and whole.low == pytest.approx(34.2, abs=0.1)
    assert interval([1.0] * 20)[1] == 1.0 and 0.8 < interval([1.0] * 20)[0] < 0.9
    write_csv(rows, tmp_path / "results.csv")
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert lines[0].startswith("task,protocol,method,budget,n,score,low,high") and len(lines) == 3


def test_sharing_changes_times_and_nothing_else(chat, tmp_path):
    grid = Grid(("full", "snapkv", "h2o", "snapkv+adakv", "infllm", "emllm", "sentencekv"), (70, 200))
    samples = [sample(0), sample(1), choice(shots=CONTEXT)]
    exact = tiny_chat.model().double(), chat[1]  # a batch rounds otherwise, and what is nearly as good may be chosen
    together, alone = (evaluate(exact, samples, grid, tmp_path / str(share), share=share) for share in (True, False))
    for one, other in zip(together, alone, strict=True):
        weights = one.pop("loglikelihoods", []), other.pop("loglikelihoods", [])
        assert one == other and weights[0] == pytest.approx(weights[1], abs=1e-9)
    times = [json.loads(line) for line in (tmp_path / "False" / "times.jsonl").read_text().splitlines()]
    assert {(each["prefill_configs"], each.get("decode_configs", 1)) for each in times} == {(1, 1)}


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_methods_that_can_use_a_question_are_told_it_when_it_is_known(chat, protocol, tmp_path, monkeypatch):
    """Q-LLM without its question would be InfLLM."""
    told, tell = [], Sequence.set_question

    def noting(sequence, question, tokens):
        tell(sequence, question, tokens)
        known = getattr(sequence.cache.backend, "question", None)
        told.append((sequence.config.method.name, question, len(sequence.token_ids), bool(known)))

    monkeypatch.setattr(Sequence, "set_question", noting)
    grid = Grid(("snapkv", "infllm", "qllm", "actqkv", "quest"), (80,), (protocol,))
    rows = {row["method"]: row for row in evaluate(chat, [sample()], grid, tmp_path)}
    before = 0 if protocol == "aware" else len(build_prompt(chat[1], sample(), protocol, 1024).context)
    asked = {name: (question, fed, used) for name, question, fed, used in told}
    assert all(asked[name] == ("What is 0?", before, name in ("qllm", "actqkv")) for name in asked)
    assert {"qllm", "actqkv", "infllm"} <= set(asked) and len(rows) == 5
    told.clear()
    evaluate(chat, [sample(context="")], grid, tmp_path / "alone")
    assert not told  # a question is not read for itself


def test_questions_about_one_text_share_its_reading(chat, tmp_path, monkeypatch):
    samples = [sample(0), sample(0, id="1", question=" And then?"), sample(0, id="2", task="other")]
    made = items(samples, ("agnostic", "aware"))
    assert [(item.protocol, len(item.samples)) for item in made] == [
        ("agnostic", 2), ("aware", 1), ("aware", 1), ("agnostic", 1), ("aware", 1),
    ]  # fmt: skip
    apart = [evaluate(chat, [each], GRID, tmp_path / each.id / each.task) for each in samples]
    readings = []
    counted = lambda *given: readings.append(given) or prefill_shared(*given)  # noqa: E731
    monkeypatch.setattr("kvkeep.evaluate.prefill.prefill_shared", counted)
    rows = evaluate(chat, samples, GRID, tmp_path)
    assert len(readings) == 5

    def ordered(rows):
        return sorted(rows, key=lambda row: [str(row[name]) for name in KEY])

    assert ordered(rows) == ordered(row for each in apart for row in each)


def test_nothing_of_a_question_or_an_answer_is_dropped(chat):
    """Query-agnostic: what was kept of the context is asked as it is (trap of compressing the question with it)."""
    model, words = chat
    cache = kvkeep.Cache(model, "h2o", 40, schedule="prompt")
    prompt = build_prompt(words, sample(), "agnostic", 1024)
    logits = prefill_shared(model, prompt.context[None], [cache])
    want = []
    for token in prompt.question.tolist():
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    assert cache.report().kept_per_head == 40 + len(prompt.question)
    for _ in range(6):
        want.append(int(logits.argmax()))
        logits = model(torch.tensor([want[-1:]]), past_key_values=cache).logits[0, -1]
    (row,) = [row for row, _ in Worker(*chat, [("h2o", 40)])(items([sample()], ["agnostic"])[0])]
    assert row["answer"] == words.decode(want, skip_special_tokens=True)


@pytest.mark.trap(21)
def test_long_prompts_are_cut_as_longbench_does(chat):
    words = chat[1]
    made = sample(margin=50, max_new_tokens=10)
    text = CONTEXT + " What is 0? It is"
    for window in (1024, 200, 201):
        got = build_prompt(words, made, "aware", window)
        half = (window - 50) // 2
        want = text if len(text) <= window - 50 else text[:half] + text[-half:]
        assert words.decode(got.context) == f"<s>{want.removesuffix(' It is')}</s><s> It is"
        assert got.cut == len(text) - len(want) and got.rule == "middle of the prompt, halves decoded"
    with pytest.raises(BadInput, match="a context length of 51 tokens leaves none for a prompt: 50"):
        build_prompt(words, made, "aware", 51)


def test_a_prompt_can_be_kept_shorter_than_the_window(chat, tmp_path):
    (row,) = evaluate(chat, [sample()], Grid(("full",), (), ("aware",)), tmp_path, max_length=100)
    assert row["prompt_tokens"] == 100 and row["truncated"] > 0


def test_long_answers_stay_within_the_budget(chat, tmp_path):
    grid = Grid(("full", "tova", "snapkv:window=8"), (40,), ("aware",))
    rows = evaluate(chat, [sample(long=True, metric="math", max_new_tokens=20)], grid, tmp_path)
    assert [row["schedule"] for row in rows] == [None, 1, 128]
    assert [row["compressed"] for row in rows] == ["nothing", "decoding", "decoding"]


def test_a_full_disk_is_named_and_costs_nothing(chat, tmp_path, monkeypatch):
    whole = evaluate(chat, [sample()], GRID, tmp_path / "whole")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    evaluate(chat, [sample()], replace(GRID, protocols=("agnostic",)), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("kvkeep.evaluate.results.os.fsync", full)
        with pytest.raises(BadInput, match="cannot be written .No space left on device.; its 5 rows are safe"):
            evaluate(chat, [sample()], GRID, tmp_path / "out")
    with (tmp_path / "out" / "rows.jsonl").open("a") as file:
        file.write('{"task": "to')  # what there was room for
    assert evaluate(chat, [sample()], GRID, tmp_path / "out") == whole
