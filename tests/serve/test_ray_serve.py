"""`kvkeep serve --ray`: several replicas answer as one; one that dies is replaced."""

import json
import os
import signal
import urllib.request
from importlib.util import find_spec

import openai
import psutil
import pytest
import serving
from serving import wait_until

if any(find_spec(name) is None for name in ("ray", "grpc", "mmh3")):
    pytest.skip("needs ray[serve]", allow_module_level=True)
from kvkeep.serve.job import beginning

TEXT = "The keeper of the lighthouse counted geese over the calm grey sea. " * 6
COLD = {"model": "tiny", "temperature": 0, "max_tokens": 10}
SLOW = COLD | {"max_tokens": 400, "extra_body": {"kvkeep": {"budget": 512}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    keys = folder / "keys.txt"
    keys.write_text("alice\nbob\n")
    options = (
        "--ray",
        "--replicas",
        "2",
        "--dtype",
        "auto",
        "--keys",
        str(keys),
        "--prefix-folder",
        str(folder / "kept"),
    )
    with serving.process(folder, *options, "--prefix-folder", str(folder / "kept"), double=True) as found:
        found.kept = folder / "kept"
        yield found
        found.terminate()
        assert found.wait(120) == 0


@pytest.fixture(scope="module")
def alice(served):
    with serving.client(served, "alice") as found:
        yield found


def chat(api, *texts, **how):
    """A conversation: the user and the assistant take turns."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return api.chat.completions.create(messages=messages, **(COLD | how))


def counted(served, name):
    """By replica."""
    with urllib.request.urlopen(f"{served.url}/metrics") as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith(name + "{")]
    found = {}
    for line in lines:
        number = line.split('replica="')[1][0]
        found[number] = found.get(number, 0) + float(line.rsplit(" ", 1)[1])
    return found


@pytest.mark.slow
def test_a_response_is_found_and_continued_where_it_was_answered(served, alice):
    how = {"model": "tiny", "max_output_tokens": 4}
    for number in range(6):
        first = alice.responses.create(input=f"{number}: {TEXT}", **how)
        *_, last = alice.responses.create(input="And?", previous_response_id=first.id, stream=True, **how)
        second = last.response
        third = alice.responses.create(input="So?", previous_response_id=second.id, **how)
        assert first.usage.input_tokens < second.usage.input_tokens < third.usage.input_tokens
        assert alice.responses.retrieve(second.id).output_text == second.output_text
        alice.responses.delete(third.id)


def test_conversations_stay_with_their_replica_and_are_spread_over_all(served, alice):
    """Every turn finds the one before; answers are those of one engine."""
    before = counted(served, "kvkeep_requests_total")
    with (
        serving.thread(serving.engine(None, prefix_cache=10**9), ["alice"]) as single,
        serving.client(single, "alice") as one,
    ):
        single.engine.model.double()
        for number in range(8):
            first = f"{number}: {TEXT}"
            said = chat(alice, first).choices[0].message.content
            again = chat(alice, first, said, "And now?")
            assert again.usage.prompt_tokens_details.cached_tokens > len(first) - 64
            expected = chat(one, first).choices[0].message.content
            assert (said, again.choices[0].message.content) == (
                expected,
                chat(one, first, expected, "And now?").choices[0].message.content,
            )

    def more():
        after = counted(served, "kvkeep_requests_total")
        return {number: count - before.get(number, 0) for number, count in after.items()}

    wait_until(lambda: sum(more().values()) >= 16)  # the last one is counted after its answer is sent
    assert sum(more().values()) == 16 and set(more()) == {"0", "1"} and all(n % 2 == 0 for n in more().values())


def test_contexts_are_found_wherever_they_are(served, alice):
    headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
    made = []
    for number in range(5):
        body = json.dumps({"model": "tiny", "text": f"{number} {TEXT}"}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{served.url}/v1/contexts", body, headers)) as reply:
            made.append(json.load(reply))
    with urllib.request.urlopen(urllib.request.Request(f"{served.url}/v1/contexts", headers=headers)) as reply:
        assert {each["id"] for each in json.load(reply)["data"]} >= {each["id"] for each in made}
    for each in made:
        about = {"extra_body": {"kvkeep": {"context": each["id"]}}}
        assert chat(alice, "How many?", **about).usage.prompt_tokens_details.cached_tokens == each["tokens"] // 64 * 64
        with serving.client(served, "bob") as bob, pytest.raises(openai.NotFoundError):
            chat(bob, "How many?", **about)


def test_keys_and_rubbish_are_refused_as_by_one_server(served, alice):
    with serving.client(served, "mallory") as mallory, pytest.raises(openai.AuthenticationError):
        mallory.models.list()
    with pytest.raises(openai.BadRequestError, match="Field required"):
        alice.post("/chat/completions", body={"model": "tiny"}, cast_to=object)
    with pytest.raises(openai.APIStatusError) as caught:
        alice.completions.create(model="tiny", prompt="x" * 5_000_000)
    assert caught.value.status_code == 413


def test_a_client_that_goes_away_frees_its_row(served, alice):
    stream = chat(alice, "Go on.", stream=True, **SLOW)
    next(stream)
    wait_until(lambda: sum(counted(served, "kvkeep_answers_running").values()) == 1)
    stream.close()
    wait_until(lambda: sum(counted(served, "kvkeep_answers_running").values()) == 0)


@pytest.mark.slow
def test_a_replica_that_is_killed_fails_its_own_answers_alone(served, alice):
    """Each of the others is whole and its own; who asks again is answered, also about a context that is on disk."""
    made = alice.post("/contexts", body={"model": "tiny", "text": TEXT + "On disk."}, cast_to=object)
    wait_until(lambda: (served.kept / made["id"]).is_dir())
    streams = {}
    while not all(counted(served, "kvkeep_answers_running").values()):  # on both
        prompt = f"{len(streams)}: tell me."
        streams[prompt] = chat(alice, prompt, stream=True, **SLOW)
        next(streams[prompt])
    replicas = [each for each in psutil.Process(served.pid).children(recursive=True) if "ServeReplica" in each.name()]
    os.kill(replicas[0].pid, signal.SIGKILL)
    ended = {prompt: read(stream) for prompt, stream in streams.items()}
    assert {is_lost for _, is_lost in ended.values()} == {True, False}
    for prompt, (text, is_lost) in ended.items():
        again = chat(alice, prompt, **SLOW).choices[0].message.content
        assert again.startswith(text) and (is_lost or again == text)
    about = {"extra_body": {"kvkeep": {"context": made["id"]}}}
    assert chat(alice, "How many?", **about).usage.prompt_tokens_details.cached_tokens == made["tokens"] // 64 * 64


def read(stream):
    """-> its text, and whether its replica died"""
    text = ""
    try:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        assert error.code == "replica_lost"
        return text, True
    return text, False


def test_requests_that_begin_alike_have_the_same_beginning():
    def messages(*texts, system="Short."):
        said = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, texts, strict=False)]
        return {"messages": [{"role": "system", "content": system}, *said]}

    assert beginning(messages("a")) == beginning(messages("a", "b", "c"))
    assert beginning(messages("a")) != beginning(messages("b"))
    assert beginning(messages("a", system="x" * 9000)) == beginning(messages("b", system="x" * 9000))
    assert beginning({"prompt": "x" * 5000 + "a"}) == beginning({"prompt": "x" * 5000 + "b"})
    assert beginning({"input": "a", "instructions": "b"}) != beginning({"input": "a"})
    for odd in ({}, {"messages": None}, {"messages": 3}, {"messages": [3, None, "x"]}, {"prompt": [1, 2]}):
        assert isinstance(beginning(odd), str)


@pytest.mark.filterwarnings("ignore")  # of ray, when it is imported
def test_a_stream_of_the_responses_api_that_is_lost_ends_with_an_event_of_type_error():
    """Old: the error's own type took its place."""
    from kvkeep.serve.failure import Failure
    from kvkeep.serve.front import RESPONSES, _last_event

    name, data = _last_event(RESPONSES, Failure(503, "the replica is gone")).decode().strip().split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and event["type"] == "error" and event["message"] == "the replica is gone"
    assert event.keys() == {"type", "sequence_number", "code", "message", "param"}
