"""Conversations: texts that hold what is asked, answers that are the model's own, scores by turn."""

import csv
import json
import re
import socket
import threading
from dataclasses import replace

import pytest
import tiny_chat
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import app
from kvkeep.cli.show import print_scores
from kvkeep.errors import BadInput, BadParameter, NoData
from kvkeep.evaluate import summary
from kvkeep.evaluate.grid import TALKS as WAYS
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.prompt import answerable
from kvkeep.evaluate.suite import Sources, load
from kvkeep.evaluate.talk import VIAS
from kvkeep.evaluate.tasks.talk import ASKED, FACTS, MAX_NEW_TOKENS, TALKS, sized
from kvkeep.evaluate.worker import Worker
from kvkeep.model.chat import encode
from kvkeep.model.load import load_tokenizer

LENGTH = 2400  # of bytes: little more than facts, questions and answers
SENTENCE = 120  # a byte more than the longest has


def turns(task="talk/system", length=LENGTH, count=1, seed=42, new=None):
    made = sized(task, length, tiny_chat.tokenizer(), count, seed)
    return [replace(turn, max_new_tokens=new or turn.max_new_tokens) for turn in made]


def numbers(text):
    return re.findall(r"\d+", text)


@pytest.mark.parametrize("task", TALKS)
@pytest.mark.parametrize("kind", ["bytes", pytest.param("default", marks=pytest.mark.real)])
def test_conversations_fill_their_length(task, kind):
    tokenizer = tiny_chat.tokenizer() if kind == "bytes" else load_tokenizer("default")
    for length in (2400, 3000):
        made, messages = sized(task, length, tokenizer, 2), []
        for turn in made[:ASKED]:
            if turn.talk == 0:
                messages = [*turn.messages(messages), {"role": "assistant", "content": ""}]
        answers = sum(message["role"] == "assistant" for message in messages)
        taken = len(encode(tokenizer, messages)[0]) + answers * MAX_NEW_TOKENS
        assert length - SENTENCE < taken <= length


@pytest.mark.parametrize("task", TALKS)
def test_a_text_holds_its_facts_and_no_other_number(task):
    made = turns(task, 9000, count=2)
    for number in range(2):
        mine = made[ASKED * number : ASKED * (number + 1)]
        (text,) = {turn.context for turn in mine}
        found = numbers(text)
        assert len(set(found)) == len(found) == FACTS
        assert len({turn.question for turn in mine}) == ASKED
        for turn in mine:
            (answer,) = turn.references
            fact = turn.question.removeprefix("What is the ").partition("?")[0]
            assert f"The {fact} is {answer}." in text and text.count(fact) == 1
            assert METRICS[turn.metric](f"It is {answer}.", turn.references) == 100
            assert METRICS[turn.metric](f"It is {int(answer) + 1}.", turn.references) == 0
        places = [text.index(each) / len(text) for each in found]
        assert places == pytest.approx([(2 * n + 1) / (2 * FACTS) for n in range(FACTS)], abs=0.04)


def test_the_three_tasks_ask_the_same_and_a_seed_decides_what():
    asked = {task: [(turn.question, turn.references) for turn in turns(task)] for task in TALKS}
    assert asked["talk/user"] == asked["talk/system"] == asked["talk/shared"]
    assert turns() == turns()
    assert not {turn.references for turn in turns()} & {turn.references for turn in turns(seed=43)}


def test_where_the_text_stands():
    for task, roles in {"talk/user": ["user"], "talk/system": ["system", "user"]}.items():
        first, second = turns(task)[:2]
        begin = first.messages([])
        assert [message["role"] for message in begin] == roles
        assert [first.context in message["content"] for message in begin] == [True, False][: len(roles)]
        assert begin[-1]["content"].endswith(first.question)
        answered = [*begin, {"role": "assistant", "content": "4711"}]
        assert second.messages(answered) == [*answered, {"role": "user", "content": second.question}]


def test_conversations_that_share_a_text_take_turns():
    made = turns("talk/shared")
    assert [(turn.talk, turn.turn) for turn in made] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    assert [(turn.talk, turn.turn) for turn in turns("talk/user")] == [(0, turn) for turn in range(1, ASKED + 1)]


def test_a_length_without_room_is_refused():
    with pytest.raises(BadParameter, match=r"length=600 cannot hold talk/user: it takes 1\d\d\d tokens or more"):
        turns("talk/user", 600)
    with pytest.raises(BadParameter, match="count=0"):
        turns(count=0)


def test_what_the_model_cannot_hold_is_left_out():
    short, long = turns(), turns("talk/user", LENGTH + 1)
    found, why = answerable([*short, *long], LENGTH)
    assert found == short and why == {
        "talk/user": "is a conversation of 2,401 tokens, and the model's context length is 2,400"
    }
    with pytest.raises(NoData, match="is a conversation of 2,401 tokens"):
        answerable(long, LENGTH)


def test_talks_are_asked_for_by_name():
    made, skipped = load(["talk"], tiny_chat.tokenizer(), Sources(lengths=(2400, 3000), limit=1))
    assert not skipped and len(made) == len({(turn.task, turn.id) for turn in made}) == 2 * 3 * ASKED
    assert {turn.task for turn in made} == {f"{task}_{length}" for task in TALKS for length in (2400, 3000)}


@pytest.fixture(scope="module")
def chat():
    model, words = tiny_chat.sharp()
    model.config.max_position_embeddings = 4096
    return model, words


@pytest.fixture
def asked(monkeypatch):
    """A list of the engines that are made, with their options, and of what they are asked."""
    found = []

    class Watched(kvkeep.Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.asked = []
            found.append((options, self.asked))

        def submit(self, messages, **options):
            handle = super().submit(messages, **options)
            self.asked.append(("submit", handle.request.ids.tolist(), handle.request))
            return handle

        def chat(self, messages, **options):
            text = super().chat(messages, **options)
            self.asked.append(("chat", encode(self.tokenizer, messages)[0].tolist(), None))
            return text

    monkeypatch.setattr("kvkeep.evaluate.talk.Engine", Watched)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", TALKS)
def test_earlier_answers_are_the_models_own(chat, tmp_path, asked, task, way):
    made, grid = turns(task, new=3), Grid(("full", "snapkv"), (64,), talks=(way,))
    rows = run(Worker(*chat, grid.configs), made, grid, tmp_path)
    assert [row["method"] for row in rows] == ["full"] * ASKED + ["snapkv"] * ASKED
    via, history = way.split("-")
    for (options, calls), mine in zip(asked, (rows[:ASKED], rows[ASKED:]), strict=True):
        assert options["history"] == (None if history == "none" else "host")
        assert [call for call, *_ in calls] == ["chat" if via == "chat" else "submit"] * ASKED
        talks = {}
        for turn, row, (_, ids, _) in zip(made, mine, calls, strict=True):
            messages = turn.messages(talks.get(turn.talk, []))
            assert ids == encode(chat[1], messages)[0].tolist()
            talks[turn.talk] = [*messages, {"role": "assistant", "content": row["answer"]}]
            assert (row["turn"], row["talk"], row["protocol"]) == (turn.turn, turn.talk, way)
            assert row["new_tokens"] <= 3 and row["prompt_tokens"] == len(ids)
    full, kept = rows[ASKED - 1], rows[-1]
    assert full["kept_per_head"] >= full["prompt_tokens"] and full["bytes"] >= full["full_bytes"] > 0
    assert 64 <= kept["kept_per_head"] < kept["prompt_tokens"] / 4 and kept["bytes"] < kept["full_bytes"] / 4


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("task", TALKS)
def test_no_turn_loses_what_an_earlier_one_evicted(tmp_path, task, via):
    """With a history, an answer is that to a conversation that is read as a whole."""
    model, words = tiny_chat.retrieving()
    model.config.max_position_embeddings = 4096
    made, grid = turns(task, new=6), Grid(("kvkeep",), (48,), talks=(f"{via}-host", "submit-none"))
    rows = run(Worker(model, words, grid.configs), made, grid, tmp_path)
    talks, other = {}, 0
    with kvkeep.Engine(model, words, "kvkeep", 48, history=None) as engine:
        for turn, row, lost in zip(made, rows[:ASKED], rows[ASKED:], strict=True):
            messages = turn.messages(talks.get(turn.talk, []))
            assert row["answer"] == engine.submit(messages, max_new_tokens=6).result().strip()
            talks[turn.talk] = [*messages, {"role": "assistant", "content": row["answer"]}]
            other += row["answer"] != lost["answer"]
    assert other  # without one, answers are others


def test_a_shared_text_is_read_once(chat, tmp_path, asked):
    made, grid = turns("talk/shared", new=2), Grid(("snapkv",), (64,))
    run(Worker(*chat, grid.configs), made, grid, tmp_path)
    reused = [request.num_cached for _, _, request in asked[0][1]]
    text = len(encode(chat[1], made[0].context)[0])
    assert reused[0] == 0 and min(reused[1:]) > text - 64 - 64  # a block, and what is scored again


def test_texts_have_engines_of_their_own(chat, tmp_path, asked):
    made, grid = turns(count=2, new=2), Grid(("full", "snapkv"), (64,), talks=("submit-host", "chat-none"))
    rows = run(Worker(*chat, grid.configs), made, grid, tmp_path / "both")
    assert len(asked) == 2 * 2 * 2 and all(len(calls) == ASKED for _, calls in asked)
    alone = run(Worker(*chat, grid.configs), made[ASKED:], grid, tmp_path / "one")
    assert alone == [row for row in rows if row["id"].startswith(f"{LENGTH}-1")]


@pytest.mark.parametrize("history", ["host", "none"])
def test_a_client_over_http_has_the_answers_of_submit(tmp_path, history):
    """Of the default method, of one that knows the question, and without compression."""
    model, words = tiny_chat.retrieving()
    model.config.max_position_embeddings = 4096
    ways = f"submit-{history}", f"http-{history}"
    made, grid = turns(new=12), Grid(("full", "kvkeep_lookahead", "intentkv"), (48,), talks=ways)
    rows = run(Worker(model, words, grid.configs), made, grid, tmp_path)
    submitted, sent = ([row for row in rows if row["protocol"] == way] for way in ways)
    assert len(sent) == 3 * ASKED and [{**row, "protocol": ways[0]} for row in sent] == submitted
    assert len({row["answer"] for row in sent}) > 3


@pytest.fixture
def opened(monkeypatch):
    """A list of the addresses that servers listen on; afterwards, they are closed and their threads have ended."""
    made, create = [], socket.create_server

    def watched(*args, **options):
        found = create(*args, **options)
        made.append(found.getsockname())
        return found

    monkeypatch.setattr(socket, "create_server", watched)
    yield made
    assert made and len(set(made)) == len(made)
    names = "kvkeep-http", "kvkeep-submit"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for address in made:
        with socket.socket() as client:
            assert client.connect_ex(address)


def test_every_history_has_a_server_of_its_own_that_is_closed(chat, tmp_path, opened):
    made, grid = turns(new=2), Grid(("full", "snapkv"), (64,), talks=("http-host", "http-none"))
    assert len(run(Worker(*chat, grid.configs), made, grid, tmp_path)) == 2 * 2 * ASKED and len(opened) == 4


def test_a_turn_that_the_server_refuses_ends_the_run(chat, tmp_path, opened):
    made, grid = turns(new=5000), Grid(("full",), (64,), talks=("http-host",))
    with pytest.raises(BadInput, match="status 400: max_tokens=5000: this server allows 4096"):
        run(Worker(*chat, grid.configs), made, grid, tmp_path)


def test_a_killed_run_goes_on(chat, tmp_path):
    made, grid = turns(new=2), Grid(("full", "snapkv"), (64,))
    rows = run(Worker(*chat, grid.configs), made, grid, tmp_path)
    file = tmp_path / "rows.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:7]))
    assert run(Worker(*chat, grid.configs), made, grid, tmp_path) == rows and file.read_bytes() == whole


def test_a_schedule_is_that_of_single_questions(chat, tmp_path, asked):
    made, grid = turns(new=2), Grid(("streamingllm",), (64,))
    for own in (False, True):
        (row, *_) = run(Worker(*chat, grid.configs, own_schedule=own), made, grid, tmp_path / str(own))
        assert asked[-1][0]["schedule"] == (None if own else "prompt")


def row(turn, right, method="full", budget=None, **changes):
    place = {"task": "talk/system_1200", "protocol": "submit-host", "method": method, "budget": budget, "turn": turn}
    facts = {"metric": "ruler_string_match_all", "kept_per_head": 4.0, "bytes": 10, "full_bytes": 100, "truncated": 0}
    return {**place, **facts, "score": 100.0 * right, "template": "chat", **changes}


def some_rows():
    full = [row(1, 1), row(1, 1), row(2, 1), row(2, 0)]
    return [*full, *(row(turn, right, "snapkv", 64) for turn, right in ((1, 1), (2, 0), (1, 0), (2, 0)))]


def test_scores_by_turn():
    full, snapkv = summary.by_turn(some_rows())
    assert (full.n, full.by_turn, full.all) == (4, {1: 100, 2: 50}, 75)
    assert (snapkv.method, snapkv.budget, snapkv.by_turn, snapkv.all) == ("snapkv", 64, {1: 50, 2: 0}, 25)
    cells = [(cell.task, cell.method, cell.n, cell.score) for cell in summary.summarize(some_rows())]
    assert cells == [
        ("talk/system_1200 turn 1", "full", 2, 100), ("talk/system_1200 turn 2", "full", 2, 50),
        ("talk/system_1200 turn 1", "snapkv", 2, 50), ("talk/system_1200 turn 2", "snapkv", 2, 0),
    ]  # fmt: skip


def test_a_table_of_turns_says_what_is_left_of_full(capsys):
    alone = {**row(1, 1), "task": "vt_1200", "protocol": "aware"}
    del alone["turn"]
    print_scores([*some_rows(), alone])
    alone, said = capsys.readouterr().out.split("talk/system", 1)
    assert re.search(r"aware +full +– +100\.0 .* n=1", alone) and "vt_1200" not in said
    assert said.startswith("_1200, submit, history host: percent right by turn, 4 questions")
    assert re.search(r"full +– +100 +50 +75 +\n +snapkv +64 +50 +0 +25 +\n +% of full +50 +0 +33 +\n", said)
    print_scores([row(1, 0), row(1, 1, "snapkv", 64)])
    assert re.search(r"% of full +– +– +\n", capsys.readouterr().out)
    print_scores(some_rows()[4:])
    said = capsys.readouterr().out
    assert "of full" not in said and re.search(r"snapkv +64 +50 +0 +25\s", said)


def evaluate(out, *args, code=0):
    done = CliRunner().invoke(app, ["eval", "--out", str(out), *map(str, args)])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def tiny(monkeypatch, chat):
    monkeypatch.setattr("kvkeep.model.load.load", lambda *_, **__: chat)
    monkeypatch.setattr("kvkeep.model.load.load_tokenizer", lambda *_: chat[1])
    monkeypatch.setattr("kvkeep.model.load.load_context_length", lambda *_: 4096)


@pytest.mark.usefixtures("tiny")
def test_the_command_holds_conversations_beside_questions(tmp_path):
    args = ("--tasks", "talk/shared,passkey", "--length", LENGTH, "--limit", 1, "--methods", "full")
    done = evaluate(tmp_path, *args, "--via", "submit,chat,http,submit", "--history", "host,none")
    for way in WAYS:
        assert f"talk/shared_{LENGTH}, {way.replace('-', ', history ')}: percent right by turn" in done.stdout
    assert f"passkey_{LENGTH}" in done.stdout and f"{6 * ASKED + 2} rows in" in done.stdout
    with (tmp_path / "results.csv").open() as file:
        found = [(each["task"], each["protocol"], each["n"]) for each in csv.DictReader(file)]
    for way in ("chat-none", "http-none"):
        turns = [(f"talk/shared_{LENGTH} turn {turn}", way, "3") for turn in (1, 2)]
        assert [each for each in found if each[1] == way] == turns
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {each["template"] for each in kept if "turn" in each} == {"chat"}


@pytest.mark.parametrize("option", ["--via", "--history"])
def test_an_unknown_way_is_refused(tmp_path, option):
    said = evaluate(tmp_path, "--tasks", "talk/user", option, "pigeon", code=2).stderr
    assert "pigeon" in said and "submit-host, submit-none, chat-host, chat-none, http-host, http-none" in said


def test_the_extra_is_named_when_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    said = evaluate(tmp_path, "--tasks", "talk/user", "--via", "submit,http", code=2).stderr
    assert "--via http needs uvicorn" in said and "kvkeep[serve]" in said
