"""Limits, keys, and clients that vanish or send rubbish: others do not notice."""

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
import urllib.request
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import openai
import pytest
import serving
from pydantic import ValidationError
from serving import wait_until

from kvkeep.engine.store import Store
from kvkeep.errors import BadParameter
from kvkeep.serve.access import Keys
from kvkeep.serve.answers import Answer, Answers
from kvkeep.serve.chat_schemas import ChatRequest
from kvkeep.serve.connections import ConnectionLimits, LimitedProtocol
from kvkeep.serve.failure import Failure
from kvkeep.serve.grammar import Grammars
from kvkeep.serve.metrics import Metrics
from kvkeep.serve.middleware import RequestMiddleware
from kvkeep.serve.routes import EventStream
from kvkeep.serve.schemas import CompletionRequest, ContextRequest
from kvkeep.serve.server import TurnThread

HELLO = [{"role": "user", "content": "Hello there"}]
LONG = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def served():
    limits = {"max_body": 100_000, "max_tokens": 3000, "max_seconds": 60, "max_answers": 3}
    with serving.thread(serving.engine(), ["alice", "bob"], **limits) as found:
        yield found


@pytest.fixture(scope="module")
def alice(served):
    with serving.client(served, "alice") as found:
        yield found


@pytest.fixture(scope="module")
def bob(served):
    with serving.client(served, "bob") as found:
        yield found


DIGITS = {"type": "string", "pattern": "^[0-9]{3000}$"}
ENDLESS = {
    "model": "tiny",
    "messages": HELLO,
    "response_format": {"type": "json_schema", "json_schema": {"name": "digits", "schema": DIGITS}},
    "max_tokens": 3000,
}


def endless(api):
    """A stream that ends when nobody reads it any more, or after 3000 tokens: only digits may follow."""
    stream = api.chat.completions.create(**ENDLESS, stream=True)
    next(stream)
    return stream


def idle(served):
    return served.engine._driver.scheduler.held.num_requests == 0 and not served.live


def post(served, body, key="alice", path="/v1/chat/completions", **headers):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    with closing(http.client.HTTPConnection(served.url.removeprefix("http://"))) as connection:
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def test_a_key_is_needed(served, alice):
    for key in ("mallory", "alic", "x" * 10_000, "ä"):
        status, said = post(served, "{}", key.encode().decode("latin-1"))
        assert status == 401 and json.loads(said)["error"]["code"] == "invalid_api_key" and key not in said
    with serving.client(served, "mallory") as mallory, pytest.raises(openai.AuthenticationError):
        mallory.models.list()
    assert alice.models.list().data and serving.is_up(served.url)


def test_a_key_is_looked_at_before_the_body_comes(served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99000\r\n\r\n")
        line.settimeout(60)
        assert line.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("messages", "kind"), [([{}] * 9_000, "missing"), ([{"role": "user", "content": "x"}] * 10_001, "too_long")]
)
def test_lists_without_an_end_are_refused_at_the_first_fault(messages, kind):
    """Not with an error for every item."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"model": "tiny", "messages": messages})
    assert [each["type"] for each in caught.value.errors()] == [kind]


def test_a_client_that_vanishes_frees_its_row_at_the_next_step(served, alice):
    scheduler = served.engine._driver.scheduler
    stream = endless(alice)
    wait_until(lambda: scheduler.held.batch_of)
    stream.close()
    wait_until(lambda: idle(served))
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))  # one that waits for the whole answer
    body = {**ENDLESS, "n": 3}
    headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    wait_until(lambda: served.live)
    connection.close()
    wait_until(lambda: idle(served))


def test_nothing_is_submitted_for_a_client_that_has_gone(served, monkeypatch):
    """While its request waits for others to be tokenized."""
    submitted, busy = [], threading.Event()
    monkeypatch.setattr(served.engine, "submit", lambda *_, **__: submitted.append(1))
    served._short.submit("", busy.wait)
    headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection(served.url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(LONG), headers)
        wait_until(lambda: served.live)
    wait_until(lambda: not served.live)
    busy.set()
    served._short.submit("", lambda: None).result()
    assert not submitted


def test_what_is_submitted_when_its_client_goes_is_cancelled(served, monkeypatch):
    handles, begun, go_on = [], threading.Event(), threading.Event()
    submit = served.engine.submit

    def slow(*given, **options):
        begun.set()
        go_on.wait()
        handles.append(submit(*given, **options))
        return handles[-1]

    monkeypatch.setattr(served.engine, "submit", slow)
    headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection(served.url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps({**ENDLESS, "n": 3}), headers)
        assert begun.wait(60)
    wait_until(lambda: not served.live)
    go_on.set()
    wait_until(lambda: handles and all(each.done for each in handles) and idle(served))
    assert [each.request.finish_reason for each in handles] == ["cancelled"]


def test_prompts_are_encoded_once_and_not_at_all_when_far_too_long(served, alice, bob, monkeypatch):
    encoded, tokenizer = [], served.engine.tokenizer
    call = type(tokenizer).__call__

    def counted(self, text, **options):
        encoded.append(text)
        return call(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    assert len(alice.completions.create(model="tiny", prompt="once", n=3, max_tokens=2).choices) == 3
    assert len(bob.chat.completions.create(model="tiny", messages=HELLO, n=3, max_tokens=2).choices) == 3
    assert len(encoded) == 2
    status, said = post(served, json.dumps({"model": "tiny", "prompt": "x" * 90_000}), path="/v1/completions")
    assert status == 400 and "context_length_exceeded" in said and "90000 characters" in said and len(encoded) == 2


def test_too_many_at_once_are_refused_for_one_key_and_not_for_others(served, alice, bob):
    streams = [endless(alice) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as caught:
        alice.completions.create(model="tiny", prompt="x")
    assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "too_many_requests"
    assert bob.completions.create(model="tiny", prompt="x", max_tokens=5).choices
    for stream in streams:
        stream.close()
    wait_until(lambda: idle(served))
    assert alice.completions.create(model="tiny", prompt="x", max_tokens=5).choices
    with pytest.raises(openai.BadRequestError, match="4 answers at once"):
        alice.completions.create(model="tiny", prompt="x", n=4)


def test_a_full_queue_is_said_so():
    engine = serving.engine(max_rows=1, max_waiting=1)
    with serving.thread(engine, max_tokens=3000) as served, serving.client(served) as api:
        streams = [endless(api)]
        wait_until(lambda: engine._driver.scheduler.held.batch_of)
        streams.append(endless(api))
        with pytest.raises(openai.RateLimitError) as caught:
            api.completions.create(model="tiny", prompt="x")
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        wait_until(lambda: idle(served))


def test_a_slow_reader_holds_nobody_up(served, alice, bob):
    stream = endless(alice)  # nobody reads on
    assert bob.completions.create(model="tiny", prompt="x", max_tokens=30).usage.completion_tokens <= 30
    assert served.engine._driver.scheduler.held.batch_of  # hers is decoded all the same
    stream.close()
    wait_until(lambda: idle(served))


def called(arguments):
    """A message that called a tool."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("{", 400, "not valid JSON"),
        ("", 400, "Field required"),
        ("[]", 400, "Content-Type: application/json"),
        ("null", 400, ""),
        ('"text"', 400, ""),
        (b"\xff\xfe", 400, ""),
        ("[" * 50_000, 400, ""),
        ('{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, ""),
        ('{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, ""),
        ('{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "seed": 1e400}', 400, ""),
        ('{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "kvkeep": {"budget": 1e999}}', 400, "budg"),
        (json.dumps({"model": "tiny", "messages": [called("[" * 20_000), *HELLO]}), 400, "nested too deeply"),
        (json.dumps({"model": "tiny", "messages": [called('{"a": "\\ud800"}'), *HELLO]}), 400, "surrogate"),
        (json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 200_000}]}), 413, "100000 bytes"),
    ],
)  # fmt: skip
def test_rubbish_is_refused_in_one_line(served, body, status, said):
    found, text = post(served, body)
    assert found == status and said in json.loads(text)["error"]["message"] and "Traceback" not in text


def test_a_body_without_an_end_is_refused_before_its_end(served):
    """Chunked, so that no header tells its length."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice\r\nTransfer-Encoding: chunked\r\n"
        )
        line.sendall(
            f"{head}Content-Type: application/json\r\n\r\n".encode() + 110 * (b"400\r\n" + b"x" * 1024 + b"\r\n")
        )
        line.settimeout(60)
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_paths_that_are_not_there(served):
    assert post(served, "{}", path="/v1/nothing")[0] == 404
    assert json.loads(post(served, "{}", path="/v1/models")[1])["error"]["message"] == "Method Not Allowed"


def test_an_error_of_ours_shows_no_trace_and_the_log_no_prompt(served, alice, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("the secret prompt")

    monkeypatch.setattr(served.engine, "submit", broken)
    with caplog.at_level(logging.DEBUG), pytest.raises(openai.InternalServerError) as caught:
        alice.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "the secret prompt"}])
    assert "secret" not in caught.value.response.text and "RuntimeError" not in caught.value.response.text
    assert "RuntimeError" in caplog.text and "in _submit_all" in caplog.text and "secret" not in caplog.text
    assert not served.live


def test_an_error_in_the_middle_of_a_stream_is_an_event(served, alice):
    stream = endless(alice)
    (answers,) = served.live
    answers.answers[0].request.finish(RuntimeError("the secret prompt"))
    with pytest.raises(openai.APIError, match="the server made a mistake"):
        for _ in stream:
            pass
    wait_until(lambda: not served.live)
    served.engine._driver.cancel([answers.answers[0].request])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/contexts"])
def test_parameters_of_methods_are_the_operators_to_allow(path):
    def asked(method):
        if path == "/v1/contexts":
            return json.dumps({"model": "tiny", "text": "x", "method": method})
        return json.dumps({"model": "tiny", "prompt": "x", "kvkeep": {"method": method}})

    with serving.thread(serving.engine(prefix_cache=10**7)) as served:
        status, said = post(served, asked("snapkv:window=4+adakv"), path=path)
        assert status == 400 and "--allow-parameters" in said
        status, said = post(served, asked("snapkv" + "+adakv" * 40), path=path)
        assert status == 400 and "at most 200 characters" in said
        assert post(served, asked("snapkv+adakv"), path=path)[0] == 200
    with serving.thread(serving.engine(prefix_cache=10**7), allow_parameters=True) as served:
        assert post(served, asked("snapkv:window=4"), path=path)[0] == 200


def test_an_answer_that_takes_too_long_is_ended():
    with serving.thread(serving.engine(), max_tokens=3000, max_seconds=0.3) as served, serving.client(served) as api:
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            for _ in endless(api):
                pass
        with pytest.raises(openai.APIStatusError) as caught:
            api.chat.completions.create(**ENDLESS)
        assert caught.value.status_code == 408 and caught.value.code == "timeout"
        wait_until(lambda: idle(served))
        served.limits = replace(served.limits, max_seconds=60)
        assert api.completions.create(model="tiny", prompt="x", max_tokens=2).choices


class Waiting:
    """A request without an end."""

    done = cancelled = False
    deltas = logprobs = ()
    error = None


def test_a_reader_that_stops_reading_loses_its_places_and_its_answer(monkeypatch):
    closed = []

    async def stopped(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(1000)

    async def silent():
        await asyncio.sleep(1000)

    async def run():
        answers = Answers("alice", 1, closed.append)
        answers.begin([Answer(0, Waiting(), None)], 1, max_seconds=0.05)
        stream = EventStream(answers, SimpleNamespace(begin=lambda: [{"text": "x"}]))
        scope = {"type": "http", "path": "/", "headers": []}
        reading = asyncio.ensure_future(
            RequestMiddleware(stream, Metrics([], Store()).requests, Keys(), 99)(scope, silent, stopped)
        )
        for _ in range(3000):
            if closed:
                break
            await asyncio.sleep(0.01)
        assert closed == [answers] and answers.answers[0].request.cancelled and not reading.done()
        await asyncio.wait_for(reading, 60)

    monkeypatch.setattr("kvkeep.serve.middleware.SEND_S", 2)
    asyncio.run(run())


def test_what_goes_on_is_counted(served, alice):
    def page():
        with urllib.request.urlopen(f"{served.url}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = page()
    used = alice.completions.create(model="tiny", prompt="abc", max_tokens=5).usage
    stream = endless(alice)
    wait_until(lambda: page()["kvkeep_answers_running"])
    during = page()
    assert during["kvkeep_answers_running"] == 1 and during["kvkeep_kept_bytes"] > 0
    assert during["kvkeep_seen_tokens"] == during["kvkeep_kept_tokens"] > 10
    for _ in range(3):  # three texts, two times between them
        next(stream)
    stream.close()
    wait_until(lambda: idle(served))
    after = page()

    def more(name):
        return after.get(name, 0) - before.get(name, 0)

    assert after["kvkeep_answers_running"] == after["kvkeep_kept_bytes"] == 0
    assert more('kvkeep_requests_total{path="/v1/completions",status="200"}') == 1
    assert more("kvkeep_answer_tokens_total") > used.completion_tokens
    assert more("kvkeep_prompt_tokens_total") == during["kvkeep_seen_tokens"] + used.prompt_tokens
    assert more("kvkeep_first_token_seconds_count") == 2 and more("kvkeep_between_tokens_seconds_count") >= 2


def test_sigterm_lets_answers_end(tmp_path):
    """And exits with 0; nobody new is let in."""
    with serving.process(tmp_path, "--drain-seconds", "30") as served, serving.client(served) as api:
        whole = api.chat.completions.create(**LONG).choices[0].message.content
        stream = api.chat.completions.create(**LONG, stream=True)
        text = next(stream).choices[0].delta.content
        served.terminate()
        wait_until(lambda: not serving.is_up(served.url))
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole and served.wait(60) == 0


def test_work_is_done_key_by_key_and_skipped_when_nobody_wants_it():
    thread, busy, done = TurnThread("test"), threading.Event(), []
    first = thread.submit("alice", busy.wait)
    wait_until(first.running)
    waiting = [thread.submit(key, partial(done.append, f"{key}{n}")) for key in ("alice", "bob") for n in range(3)]
    assert waiting[1].cancel()
    busy.set()
    thread.close()
    assert first.result() and done == ["alice0", "bob0", "bob1", "alice2", "bob2"]


def test_a_short_prompt_waits_neither_for_a_long_one_nor_for_a_schema(served, bob):
    busy = threading.Event()
    served._long.submit("alice", busy.wait)
    try:
        assert bob.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2).choices
    finally:
        busy.set()


class Exchange:
    """One request to a middleware whose app reads the body, waits, answers."""

    def __init__(self, key, body):
        self.parts = [body[:70_000], body[70_000:]]
        self.read, self.go_on, self.status = asyncio.Event(), asyncio.Event(), 0
        self.scope = {"type": "http", "path": "/v1/x", "method": "POST", "client": ("here", 1), "exchange": self}
        self.scope["headers"] = [(b"authorization", f"Bearer {key}".encode())]

    async def receive(self):
        if not self.parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}

    async def send(self, message):
        self.status = self.status or message["status"]


async def read_body(scope, receive, send):
    while (await receive())["more_body"]:
        pass
    scope["exchange"].read.set()
    await scope["exchange"].go_on.wait()
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_large_bodies_of_a_key_are_parsed_one_at_a_time():
    async def run():
        app = RequestMiddleware(read_body, Metrics([], Store()).requests, Keys(["alice", "bob"]), 10**6)
        first, second, other, short = (
            Exchange(key, b"x" * size)
            for key, size in (("alice", 200_000), ("alice", 200_000), ("bob", 200_000), ("alice", 90_000))
        )
        tasks = []
        for each in (first, second, other, short):
            tasks.append(asyncio.ensure_future(app(each.scope, each.receive, each.send)))
            if each is not second:  # which began before the two that come after it
                await asyncio.wait_for(each.read.wait(), 60)
        assert not second.read.is_set()
        for each in (first, second, other, short):
            each.go_on.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert second.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(("item", "status"), [("[]", 400), ('{"a":{}}', 400), ('"\\"[{\\\\"', 200), ("7", 200)])
def test_objects_and_lists_of_a_large_body_are_counted(item, status):
    async def run():
        each = Exchange("alice", f"[{','.join([item] * 60_000)}]".encode())
        each.go_on.set()
        app = RequestMiddleware(read_body, Metrics([], Store()).requests, Keys(["alice"]), 10**6)
        await asyncio.wait_for(app(each.scope, each.receive, each.send), 60)
        assert each.status == status

    asyncio.run(run())


@pytest.mark.parametrize(
    ("properties", "said"), [(5000, "too long to compile"), (12_000, "characters, and may have"), (300, None)]
)
def test_a_schema_that_would_hold_others_up_is_refused(properties, said):
    grammars = Grammars.of(*serving.model())
    schema = {"type": "object", "properties": {f"p{n}": {} for n in range(properties)}}
    if said is None:
        assert grammars.of_schema(schema)().allowed().any()
    else:
        with pytest.raises(BadParameter, match=said):
            grammars.of_schema(schema)


def test_only_the_beginning_of_a_text_that_cannot_fit_is_tokenized(served, alice, monkeypatch):
    read, tokenizer = [], type(served.engine.tokenizer)
    call = tokenizer.__call__
    counted = lambda self, text, **how: read.append(len(text)) or call(self, text, **how)  # noqa: E731
    monkeypatch.setattr(tokenizer, "__call__", counted)
    monkeypatch.setattr(served, "longest_token", 100)
    status, said = post(served, json.dumps({"model": "tiny", "prompt": "x" * 90_000}), path="/v1/completions")
    assert status == 400 and "context_length_exceeded" in said and read == [8 * serving.WINDOW]


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD + b"X-a: ", HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_half_open_connections_are_closed_in_time_and_make_room(sent):
    limits = ConnectionLimits(max_connections=4, header_seconds=6, body_seconds=6)
    with serving.thread(serving.engine(), connections=LimitedProtocol.of(limits)) as served, ExitStack() as opened:
        host, port = served.url.removeprefix("http://").split(":")
        lines = [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        for line in lines:
            line.sendall(sent)
        serving.wait_until(lambda: serving.is_up(served.url), 5)  # before any of them is closed for being late
        for line in lines:
            line.settimeout(20)
            with suppress(ConnectionResetError):
                assert line.recv(1000) == b""


def test_a_limit_of_descriptors_that_is_lowered_later_holds(monkeypatch):
    """The connections that are open by then make room for the next one, all at once."""
    resource, allowed = pytest.importorskip("resource"), [10_000]
    limits = ConnectionLimits(header_seconds=60)
    with serving.thread(serving.engine(), connections=LimitedProtocol.of(limits)) as served, ExitStack() as opened:
        host, port = served.url.removeprefix("http://").split(":")

        def connect(count):
            return [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]

        def is_closed(line):
            line.setblocking(False)
            try:
                return line.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        older = connect(15)
        assert serving.is_up(served.url)
        time.sleep(0.1)  # the loop's clock tells them from the others
        newer = connect(15)
        assert serving.is_up(served.url)
        monkeypatch.setattr(resource, "getrlimit", lambda name: (allowed[0],) * 2)
        allowed[0] = 20  # 10 connections
        serving.wait_until(lambda: serving.is_up(served.url), 5)
        serving.wait_until(lambda: all(map(is_closed, older)), 20)
        assert sum(map(is_closed, newer)) == 6


def test_connections_of_clients_that_take_nothing_make_room():
    """The answer is given up, but what was written is still on its way: uvicorn waits for that without an end."""
    made = LimitedProtocol.__new__(LimitedProtocol)
    made.cycle = SimpleNamespace(response_complete=False, more_body=False)
    for ends in (False, True):
        made.transport = SimpleNamespace(is_closing=partial(bool, ends))
        assert made.waits is ends


def test_the_first_schema_of_a_server_finds_the_tables_of_its_tokenizer(monkeypatch):
    """Those of a real tokenizer take a second or more, in which nobody would be answered."""
    import llguidance.hf

    grammars = Grammars.of(*serving.model())
    monkeypatch.delattr(llguidance.hf, "from_tokenizer")
    assert grammars.of_schema({"type": "integer"})().allowed().any() and grammars.bytes_of(50)


def test_a_tokenizer_without_tables_is_served_without_json():
    grammars = Grammars.of(serving.model()[0], Words())
    with pytest.raises(ValueError, match="fast tokenizers"):
        grammars.of_schema({"type": "integer"})


class Words:
    """A tokenizer that llguidance does not know."""

    eos_token_id, all_special_ids, chat_template = 1, (), None

    def get_vocab(self):
        return {}


def test_the_cost_of_a_schema_is_measured_when_it_is_asked_for_alone(monkeypatch):
    """Processes that share a model make the same grammar in a step, and must not differ in what they measure."""
    asked, grammars = [], Grammars.of(*serving.model())
    monkeypatch.setattr("kvkeep.serve.grammar.check_cost", asked.append)
    constraint = grammars.of_schema({"type": "integer"})
    grammars.matchers.clear()
    assert constraint().allowed() is not None and len(asked) == 1


def test_a_tool_that_has_to_be_called_has_to_be_given(served):
    status, said = post(served, json.dumps({**LONG, "tool_choice": "required"}))
    assert status == 400 and "there are no tools" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "images are"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: "),
        ({"model": "x" * 50_000}, "there is no model"),
        ({"x" * 50_000: 1}, "Unrecognized request argument"),
    ],
)
def test_errors_name_fields_as_they_were_written_and_repeat_little(served, change, said):
    _, text = post(served, json.dumps(LONG | change))
    message = json.loads(text)["error"]["message"]
    assert said in message and len(message) < 700 and "list[" not in message and "Message" not in message


def test_without_keys_answers_are_counted_by_address():
    with serving.thread(serving.engine(), max_answers=1) as served:
        job = CompletionRequest(model="tiny", prompt="x").job()

        async def ask():
            served.admit("10.0.0.1", job)
            with pytest.raises(Failure, match="under way"):
                await served.submit("", job, "10.0.0.1")
            (await served.submit("", job, "10.0.0.2")).close()

        asyncio.run(ask())
        served.live.clear()


def test_without_keys_addresses_take_turns():
    """In the engine's queue: one client's many prompts do not come before another's first."""
    with serving.thread(serving.engine(prefix_cache=10**7)) as served:
        job, text = CompletionRequest(model="tiny", prompt="x").job(), ContextRequest(model="tiny", text="y" * 90).job()
        scheduler = served.engine._driver.scheduler

        async def ask():
            with served.engine._driver.lock:
                places = [await served.submit("", each, address) for each, address in (
                    (job, "10.0.0.1"), (job, "10.0.0.1"), (text, "10.0.0.1"), (job, "10.0.0.2"), (text, "10.0.0.3"),
                )]  # fmt: skip
                requests = [each.answers[0].request for each in places]
                scheduler.drop_cancelled()  # those that were submitted join the queue
                order = [requests.index(each) for each in scheduler.held.waiting]
                for each in places:
                    each.close()
            return order

        assert asyncio.run(ask()) == [0, 3, 4, 1, 2]


def test_a_line_for_every_request_without_its_prompt(served, alice, caplog):
    with caplog.at_level(logging.INFO, "kvkeep.access"):
        used = alice.completions.create(model="tiny", prompt="the secret prompt", max_tokens=3).usage
        tokens = f" tokens={used.prompt_tokens}+{used.completion_tokens} "  # the last test's line may be late
        wait_until(lambda: any(tokens in line for line in caplog.messages))
    (line,) = (line for line in caplog.messages if tokens in line)
    assert line.startswith("POST /v1/completions 200 key=") and "secret" not in line and "alice" not in line
