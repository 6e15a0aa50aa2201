"""The load generator says what happened: against a server whose delays and tokens are known, and against our own."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import conversations  # noqa: E402
import load_figures  # noqa: E402
import serve_clients  # noqa: E402
from stream_client import Server, Stream, shared_out  # noqa: E402

sys.path.remove(str(BENCHMARKS))

FIRST_S, GAP_S = 0.3, 0.1  # of the fake server
WHOLE = ["a", "bcd", "", "ef"]  # the texts of its events; they have six tokens, a character each
SLACK_S = 0.25  # that a busy machine may add


def event(text="", finish=None, **more):
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]} | more)}\n\n".encode()


def usage(prompt, answer):
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": answer})


class Fake:
    """Answers requests as the plan says, in turn: by the names of its methods."""

    def __init__(self, *plan, counts=True):
        self.plan, self.counts, self.bodies, self.times = plan, counts, [], []
        self.active = self.most = self.stuck_now = 0

    async def reply(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = json.loads(await reader.readexactly(int(head.split("content-length: ")[1].split()[0])))
        kind = self.plan[len(self.bodies) % len(self.plan)]
        self.bodies.append(body)
        self.times.append(time.monotonic())
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await getattr(self, kind)(writer, body)
            await writer.drain()
        except ConnectionError:  # the client has left
            pass
        finally:
            self.active -= 1
            writer.close()

    async def busy(self, writer, body):
        said = b'{"error": {"message": "too many"}}'
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(said) + said)

    def chunk(self, writer, data):
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

    async def begin(self, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(FIRST_S)

    async def whole(self, writer, body):
        await self.begin(writer)
        for number, text in enumerate(WHOLE):
            if number:
                await asyncio.sleep(GAP_S)
            self.chunk(writer, event(text, "length" if number == len(WHOLE) - 1 else None))
        if self.counts and body["stream_options"]["include_usage"]:
            self.chunk(writer, usage(len(body["prompt"]), 6))
        self.chunk(writer, b"data: [DONE]\n\n")
        self.chunk(writer, b"")

    async def dropped(self, writer, body):
        await self.begin(writer)
        self.chunk(writer, event("a"))

    async def error(self, writer, body):
        await self.begin(writer)
        self.chunk(writer, event("a") + b'data: {"error": {"message": "out of memory"}}\n\n')
        self.chunk(writer, b"")

    async def stuck(self, writer, body):
        await self.begin(writer)
        self.chunk(writer, event("a") + event("b"))
        self.stuck_now += 1
        await asyncio.sleep(30)

    async def silent(self, writer, body):
        await asyncio.sleep(30)


@contextmanager
def fake(*plan, **how):
    """In a thread of its own. Gives the server, with its `url`."""
    made, loop = Fake(*plan, **how), asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(made.reply, "127.0.0.1", 0))
    made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        listening.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def load(url, *options):
    """The JSON lines of the command."""
    command = [sys.executable, BENCHMARKS / "serve_clients.py", "--url", url, "--model", "m", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def near(expected, slack=SLACK_S):
    """A sleep is not shorter, and on a busy machine longer."""
    return pytest.approx(expected + slack / 2, abs=slack / 2 + 0.01)


def test_a_load_says_what_the_server_did(tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = "--requests", 4, "--prompt-tokens", 50, "--answer-tokens", 6
    with fake("whole") as server:
        row, second = load(server.url, *sizes, "--repeat", 2, "--out", out, "--label", "fake")
    assert [json.loads(line) for line in out.read_text().splitlines()] == [row, second]
    assert row["answered"] == 4 and row["failed"] == {} and row["answers_of_another_length"] == 0
    assert row["most_under_way"] == row["most_streaming"] == 4 == server.most
    assert row["prompt_tokens_median"] == 50 and row["tokens_from_usage"] and row["label"] == "fake"
    assert row["ttft_s"]["p50"] == near(FIRST_S) and row["e2e_s"]["max"] == near(FIRST_S + 3 * GAP_S)
    assert row["gap_s"]["max"] == near(2 * GAP_S) and row["tpot_s"]["p50"] == near(3 * GAP_S / 5, SLACK_S / 5)
    # of five later tokens three came after a gap, two after two gaps
    assert row["itl_s"]["p50"] == near(GAP_S / 3, SLACK_S / 3) and row["itl_s"]["max"] == near(GAP_S, SLACK_S / 2)
    assert row["output_tokens_per_s"] == pytest.approx(24 / row["total_s"], rel=0.01)
    assert row["prompt_tokens_per_s"] == pytest.approx(200 / row["total_s"], rel=0.01)
    assert row["client_lag_s"]["p50"] < GAP_S


def test_failures_are_counted_and_no_latency_is_theirs():
    with fake("whole", "busy", "dropped", "error", "whole", "silent") as server:
        row = load(server.url, "--requests", 6, "--prompt-tokens", 5, "--answer-tokens", 6, "--timeout", 3)[0]
    assert row["failed"] == {"429": 1, "dropped": 1, "error in the stream": 1, "timeout": 1} and row["answered"] == 2
    assert row["output_tokens_per_s"] == pytest.approx(12 / row["total_s"], rel=0.01) and row["total_s"] < 3
    assert row["ttft_s"]["max"] == near(FIRST_S)
    with fake("busy") as server:
        row = load(server.url, "--requests", 2)[0]
    assert row["failed"] == {"429": 2} and row["answered"] == 0 and "too many" in row["first_failure"]
    row = load(server.url, "--requests", 1)[0]  # it has ended
    assert row["failed"] == {"no reply": 1}


def test_answers_of_another_length_are_told():
    with fake("whole") as server:
        assert load(server.url, "--requests", 2, "--answer-tokens", 7)[0]["answers_of_another_length"] == 2
    with fake("whole", counts=False) as server:
        row = load(server.url, "--requests", 2, "--prompt-tokens", 9, "--answer-tokens", 3)[0]
    assert not row["tokens_from_usage"] and row["answers_of_another_length"] == 0  # three events have text
    assert "does not count" in load_figures.table(row)


def test_a_closed_loop_has_so_many_under_way():
    with fake("whole") as server:
        row = load(server.url, "--requests", 6, "--at-once", 2, "--prompt-tokens", 5, "--answer-tokens", 6)[0]
    assert server.most == 2 and row["most_under_way"] == 2 and row["total_s"] >= 3 * (FIRST_S + 3 * GAP_S)
    assert row["ttft_s"]["max"] == near(FIRST_S)  # from when there is a place


def test_an_open_loop_does_not_wait_for_answers():
    how = "--requests", 12, "--rate", 20, "--prompt-tokens", 5, "--answer-tokens", 6, "--seed", 3
    with fake("whole") as server:
        row = load(server.url, *how)[0]
    options = SimpleNamespace(seed=3, rate=20.0, ids="100:128000", prompt_as="ids", model="m", eos=False)
    due = made(options, requests=12, prompt_tokens=5, answer_tokens=6)
    for _ in range(12):
        due.prompt()
    expected = due.due()
    waits = [pytest.approx(at - expected[0], abs=SLACK_S) for at in expected]  # the first may be late itself
    assert [at - server.times[0] for at in server.times] == waits
    assert row["answered"] == 12 and row["rate"] == 20 and row["most_under_way"] > 2


def test_arrivals_are_poisson():
    options = SimpleNamespace(seed=0, rate=5.0, ids="0:10")
    due = made(options, requests=4000, prompt_tokens=5, answer_tokens=6).due()
    waits = [after - before for before, after in zip([0, *due], due, strict=False)]
    assert sum(waits) / 4000 == pytest.approx(0.2, rel=0.1)
    assert sum(wait > 0.2 for wait in waits) / 4000 == pytest.approx(0.368, abs=0.03)  # exp(-1)


def made(options, setting="", number=1, **sizes):
    for name in serve_clients.SIZES:
        setattr(options, name, sizes.get(name))
    return serve_clients.Load(options, setting, number)


def test_prompts_share_their_beginning_alone():
    sizes = "--requests", 3, "--prompt-tokens", 50, "--shared", 20, "--answer-tokens", 6, "--ids", "10:5000"
    with fake("whole") as server:
        load(server.url, *sizes, "--repeat", 2)
        load(server.url, *sizes, "--prompt-as", "text", "--word", "t{}", "--eos")
    prompts = [body["prompt"] for body in server.bodies[:6]]
    assert {len(prompt) for prompt in prompts} == {50} and all(10 <= each < 5000 for each in sum(prompts, []))
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:24]) for prompt in prompts}) == 6
    asked = {"model": "m", "max_tokens": 6, "temperature": 0, "stream": True, "ignore_eos": True}
    assert server.bodies[0] | asked == server.bodies[0]
    text = server.bodies[6]["prompt"]
    assert text == " ".join(f"t{each}" for each in prompts[[p[20:] for p in prompts].index(ids_of(text)[20:])])
    assert "ignore_eos" not in server.bodies[6]


def ids_of(text):
    return [int(word[1:]) for word in text.split()]


def test_goodput_counts_who_met_both_goals():
    options = SimpleNamespace(goal_ttft=1.0, goal_itl=0.1)
    quick = stream(0.0, (0.5, "a"), (0.55, "b"))
    late, slow = stream(0.0, (1.5, "a"), (1.55, "b")), stream(0.0, (0.5, "a"), (0.7, "b"))
    whole = [each.answer() for each in (quick, late, slow, quick)]
    found = load_figures.goodput(SimpleNamespace(options=options), whole, 4.0)
    assert found["met"] == 2 and found["goodput_per_s"] == 0.5


def stream(began, *events, tokens=None):
    """What a client has noted of an answer."""
    end = events[-1][0]
    pieces = [(at, event(text)) for at, text in events]
    pieces += [(end, event(finish="length"))] + ([(end, usage(8, tokens))] if tokens else [])
    return Stream(200, {}, began, end, "", pieces)


def test_tokens_of_an_event_share_the_gap_before_it():
    seen = stream(1.0, (2.0, "xy"), (2.6, "abcdef"), (3.0, "pq"), tokens=5).answer()
    assert seen.counts == [1, 3, 1] and seen.first_token_s == 1.0
    assert seen.token_gaps == pytest.approx([0.2, 0.2, 0.2, 0.4]) and seen.mean_gap == pytest.approx(0.25)
    together = stream(0.0, (1.0, "a"), (2.0, "b"), (2.0001, "c"), (3.0, "d")).answer()
    assert together.gaps == pytest.approx([1.0, 1.0]) and together.counts == [1, 2, 1]


def test_pieces_are_cut_anywhere():
    whole = event("ü", None) + event("b", "stop")
    for place in range(1, len(whole)):
        cut = Stream(200, {}, 0.0, 2.0, "", [(1.0, whole[:place]), (2.0, whole[place:])])
        assert cut.answer().text == "üb" and not cut.answer().failure


def test_counts_add_up():
    assert shared_out(6, [1, 1, 1]) == [2, 2, 2] and shared_out(2, [5, 5, 5]) == [1, 1, 0]
    assert shared_out(10, [1, 97, 1]) == [1, 8, 1] and shared_out(3, []) == []


def test_quantiles_and_overlaps():
    assert load_figures.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"p50": 3.0, "p90": 4.6, "p99": 4.96, "max": 5.0}
    assert load_figures.spread([]) is None
    assert load_figures.most_at_once([(0, 2), (1, 3), (2.5, 4), (5, 6)]) == 2


def test_settings_have_their_sizes_and_options_go_first():
    options = SimpleNamespace(seed=0, ids="0:10")
    e = made(options, "e", requests=2)
    assert (e.requests, e.prompt_tokens, e.answer_tokens, e.shared) == (2, 8000, 128, 7000)
    with pytest.raises(SystemExit, match="--shared"):
        made(options, "e", prompt_tokens=100)


def test_other_benchmarks_clients_tell_what_they_saw_so_far():
    with fake("stuck") as server:
        clients = serve_clients.Clients(server.url, [{"prompt": "a"}] * 3)
        serving.wait_until(lambda: server.stuck_now == 3)
        time.sleep(0.5)
        found = clients.answers()
    assert [(each.text, each.failure) for each in found] == [("ab", "cut off")] * 3
    with fake("whole") as server:
        body = {"prompt": "a", "stream_options": {"include_usage": False}}
        found = serve_clients.Clients(server.url, [body] * 3, at_once=2).answers()
    assert [(each.text, each.failure) for each in found] == [("abcdef", "")] * 3 and server.most == 2


def test_a_client_may_leave():
    with fake("whole") as server:
        post = Server(f"{server.url}/v1").post("/v1/completions", b'{"stream_options": {}}', enough=lambda s: s.pieces)
        seen = asyncio.run(post)
    assert seen.answer().text == "a" and seen.answer().failure == "cut off"


def test_our_server_takes_the_load():
    with serving.thread(serving.engine()) as served:
        sizes = "--prompt-tokens", 200, "--answer-tokens", 12, "--ids", "2:258"
        row = load(served.url, "--model", "tiny", "--requests", 5, *sizes, "--goal-ttft", 60)[0]
        text = load(served.url, "--model", "tiny", "--requests", 2, *sizes, "--prompt-as", "text")[0]
        assert asyncio.run(asyncio.to_thread(Server(served.url).model)) == "tiny"
    assert row["answered"] == row["met"] == 5 and row["failed"] == {}
    assert row["prompt_tokens_median"] == 200 and row["answers_of_another_length"] == 0 and row["tokens_from_usage"]
    assert 0 < row["ttft_s"]["p50"] <= row["e2e_s"]["p50"]
    assert text["answered"] == 2 and text["prompt_tokens_median"] > 200  # a byte is a token there
    assert "5 answered in" in load_figures.table(row) and "first token" in load_figures.table(row)


def test_conversations_take_turns_through_the_same_client(capsys):
    with serving.thread(serving.engine(), max_answers=100) as served:
        options = SimpleNamespace(url=served.url, model="tiny", new=4, rows=2, turns=2, at_once=None, numbered=None)
        options.lengths = "30"
        asyncio.run(conversations.converse(options))
        options.model = "other"
        with pytest.raises(RuntimeError, match="404"):
            asyncio.run(conversations.converse(options))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["round"] for row in rows] == [0, 1] and all(0 < row["first_token_s"] <= row["s"] for row in rows)
