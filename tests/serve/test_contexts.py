"""Compressed texts that requests share, and histories that are not prefilled again."""

import http.client
import json
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from threading import Event

import openai
import pytest
import serving

TEXT = "The keeper of the lighthouse counted geese over the calm grey sea. " * 12
COLD = {"model": "tiny", "temperature": 0, "max_tokens": 10}


@pytest.fixture(scope="module")
def served():
    with serving.thread(serving.engine(prefix_cache=10**9), ["alice", "bob"]) as found:
        yield found


@pytest.fixture(scope="module")
def apis(served):
    with serving.client(served, "alice") as alice, serving.client(served, "bob") as bob:
        yield alice, bob


def call(served, key, verb="GET", name="", body=None):
    """-> status, object"""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps({"model": "tiny", **body}).encode()
    asked = urllib.request.Request(f"{served.url}/v1/contexts{name}", data, headers, method=verb)
    try:
        with urllib.request.urlopen(asked) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask(api, context, question="How many geese?", **more):
    messages = [{"role": "user", "content": question}]
    return api.chat.completions.create(messages=messages, **COLD, **more, extra_body={"kvkeep": {"context": context}})


def test_a_context_is_asked_about_as_the_engine_does(served, apis):
    status, made = call(served, "alice", "POST", body={"text": TEXT, "method": "knorm", "budget": 100})
    assert status == 200 and made["object"] == "context" and made["tokens"] > 500 and made["bytes"] > 0
    with serving.engine("knorm", 100) as engine:
        expected = engine.read(TEXT).ask("How many geese?", max_new_tokens=10)
    reply = ask(apis[0], made["id"])
    assert reply.choices[0].message.content == expected and reply.usage.kvkeep["method"] == "knorm"
    assert 0 <= made["tokens"] - reply.usage.prompt_tokens_details.cached_tokens < 64  # whole blocks
    assert call(served, "alice", name=f"/{made['id']}") == (200, made)
    assert made in call(served, "alice")[1]["data"]


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({}, {"method": "kvkeep", "budget": 64}),
        ({"budget": 100}, {"method": "kvkeep", "budget": 100}),
        ({"kvkeep": {"method": "kvkeep", "budget": 0.5}}, {"method": "kvkeep", "budget": 0.5}),
        ({"method": "knorm"}, {"method": "knorm", "budget": 64}),
    ],
)
def test_a_context_says_how_questions_about_it_are_answered(served, apis, asked, used):
    _, made = call(served, "alice", "POST", body={"text": TEXT + str(used), **asked})
    usage = ask(apis[0], made["id"]).usage.kvkeep
    assert made["kvkeep"] == used == {name: usage[name] for name in used}
    assert call(served, "alice", name=f"/{made['id']}") == (200, made)
    assert call(served, "alice", "POST", body={"text": TEXT, "kvkeep": {"context": made["id"]}})[0] == 400


def test_a_context_is_asked_about_without_a_chat_and_without_a_number_of_tokens(served, apis):
    _, made = call(served, "alice", "POST", body={"text": TEXT, "method": "knorm", "budget": 100})
    about = {"extra_body": {"kvkeep": {"context": made["id"]}}}
    whole = ask(apis[0], made["id"]).choices[0].message.content
    assert apis[0].completions.create(prompt="How many geese?", **COLD, **about).choices[0].text == whole
    asked = [{"role": "user", "content": "How many geese?"}]
    stop = whole[3:5]
    short = apis[0].chat.completions.create(model="tiny", temperature=0, messages=asked, stop=stop, **about)
    assert short.choices[0].message.content == whole[: whole.index(stop, 1)]


@pytest.mark.parametrize("more", [{"method": "full"}, {"budget": 9}, {"protocol": "aware"}])
def test_what_a_context_has_already_is_refused_by_name(served, apis, more):
    _, made = call(served, "alice", "POST", body={"text": TEXT})
    asked = {"model": "tiny", "prompt": "How many?", "extra_body": {"kvkeep": {"context": made["id"], **more}}}
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(more))} cannot be given with a context"):
        apis[0].completions.create(**asked)


def test_a_context_deleted_while_its_request_waits_is_not_found(served, apis, monkeypatch):
    _, made = call(served, "alice", "POST", body={"text": TEXT + "Gone."})

    def gone(*given):
        raise KeyError(made["id"])

    monkeypatch.setattr(served.engine.store, "after_text", gone)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(apis[0], made["id"])
    assert caught.value.code == "context_not_found"


def test_a_context_is_its_keys_alone(served, apis):
    _, made = call(served, "alice", "POST", body={"text": TEXT + "Mine."})
    name = f"/{made['id']}"
    assert call(served, "bob", name=name)[0] == call(served, "bob", "DELETE", name)[0] == 404
    assert made["id"] not in [each["id"] for each in call(served, "bob")[1]["data"]]
    with pytest.raises(openai.NotFoundError) as caught:
        ask(apis[1], made["id"])
    assert caught.value.code == "context_not_found"
    assert call(served, "mallory", name=name)[0] == 401
    assert call(served, "alice", "DELETE", name)[1] == {"id": made["id"], "object": "context.deleted", "deleted": True}
    assert call(served, "alice", name=name)[0] == 404


def test_a_public_context_is_everybodys_to_ask_and_is_there_until_all_who_made_it_remove_it(served, apis):
    body = {"text": TEXT + "All.", "public": True}
    _, made = call(served, "alice", "POST", body=body)
    name = f"/{made['id']}"
    assert ask(apis[1], made["id"]).choices == ask(apis[0], made["id"]).choices
    assert call(served, "bob", "DELETE", name)[0] == 403
    assert call(served, "bob", "POST", body=body) == (200, made)
    assert call(served, "alice", "DELETE", name)[0] == 200
    assert call(served, "alice", "DELETE", name)[0] == 403  # it is bob's alone by now
    assert call(served, "bob", name=name) == (200, made)
    assert call(served, "bob", "DELETE", name)[0] == 200 and call(served, "bob", name=name)[0] == 404


def test_an_agents_loop_pays_for_new_tokens_only(apis):
    """A history that grows: what was seen before is found, for its key alone, and the answers are the same."""
    history = [{"role": "system", "content": "An agent's loop. " + TEXT[:300]}]
    cached = []
    for turn in range(4):
        history.append({"role": "user", "content": f"Question {turn}: " + TEXT[:100]})
        reply = apis[0].chat.completions.create(messages=history, **COLD)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        last = reply.usage.prompt_tokens
        history.append({"role": "assistant", "content": reply.choices[0].message.content})
    assert cached[0] == 0 and cached[1] > 300 and cached == sorted(cached) and last - cached[-1] < 250
    other = apis[1].chat.completions.create(messages=history[:-1], **COLD)
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert other.choices[0].message.content == reply.choices[0].message.content


def test_a_chat_is_encoded_once_for_all_its_answers(served, apis, monkeypatch):
    """And is cut into stored parts all the same."""
    calls, tokenizer = [], type(served.engine.tokenizer)
    call_it = tokenizer.__call__
    monkeypatch.setattr(tokenizer, "__call__", lambda *given, **how: calls.append(1) or call_it(*given, **how))
    said = [{"role": "user", "content": "Once. " + TEXT}, {"role": "assistant", "content": "So."}]
    said = [*said, {"role": "user", "content": "Why?"}]
    for cached in (0, len(TEXT) - 64):
        calls.clear()
        reply = apis[0].chat.completions.create(model="tiny", messages=said, n=3, max_tokens=4, seed=1)
        assert len(reply.choices) == 3 and len(calls) == 1
        assert reply.usage.prompt_tokens_details.cached_tokens >= cached


def test_what_is_stored_is_counted(served, apis):
    ask(apis[0], call(served, "alice", "POST", body={"text": TEXT})[1]["id"])
    with urllib.request.urlopen(f"{served.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert found["kvkeep_history_bytes"] == served.engine.store.histories.nbytes > 0 == found["kvkeep_prefix_bytes"]
    assert 0 < found["kvkeep_cached_tokens_total"] < found["kvkeep_prompt_tokens_total"]


def test_without_a_store_there_are_no_contexts():
    with serving.thread(serving.engine()) as served:
        status, said = call(served, "", "POST", body={"text": TEXT})
        assert status == 400 and "--prefix-cache" in said["error"]["message"]


def test_a_key_may_have_so_many_contexts_and_bytes():
    """Others are not affected; whoever removes one has room again, and what was too much is not kept."""
    limits = {"max_contexts": 2, "max_context_bytes": 40_000}
    engine = serving.engine("knorm", 64, prefix_cache=10**7, history=None)
    with serving.thread(engine, ["alice", "bob"], **limits) as served:
        first = call(served, "alice", "POST", body={"text": TEXT})[1]
        assert 10_000 < first["bytes"] < 20_000
        assert call(served, "alice", "POST", body={"text": TEXT + "2"})[0] == 200
        status, said = call(served, "alice", "POST", body={"text": TEXT + "3"})
        assert status == 429 and said["error"]["code"] == "too_many_contexts"
        assert "2 contexts" in said["error"]["message"] and "DELETE /v1/contexts/ID" in said["error"]["message"]
        assert call(served, "bob", "POST", body={"text": TEXT})[0] == 200
        call(served, "alice", "DELETE", f"/{first['id']}")
        status, said = call(served, "alice", "POST", body={"text": TEXT, "budget": 500})
        assert status == 429 and "40.0 kB" in said["error"]["message"]
        assert len(call(served, "alice")[1]["data"]) == 1
        assert call(served, "alice", "POST", body={"text": TEXT})[0] == 200


def test_a_public_context_counts_for_every_key_that_made_it():
    """A key that may not have it has no claim, and takes nobody else's away."""
    with serving.thread(serving.engine(prefix_cache=10**7), ["alice", "bob"], max_contexts=1) as served:
        shared = {"text": TEXT, "public": True}
        made = call(served, "alice", "POST", body=shared)[1]
        assert call(served, "bob", "POST", body=shared) == (200, made)
        assert call(served, "bob", "POST", body={"text": TEXT + "2"})[0] == 429
        call(served, "bob", "DELETE", f"/{made['id']}")
        assert call(served, "bob", "POST", body={"text": TEXT + "2"})[0] == 200
        assert call(served, "bob", "POST", body=shared)[0] == 429
        assert call(served, "alice", name=f"/{made['id']}") == (200, made)


@contextmanager
def held(engine):
    """No step of the engine begins within."""
    with engine._driver.lock:
        yield


def asked(served, text, **how):
    """A connection on which alice asks for a context."""
    line = http.client.HTTPConnection(served.url.removeprefix("http://"))
    headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
    line.request("POST", "/v1/contexts", json.dumps({"model": "tiny", "text": text, **how}), headers)
    return line


def left(served, text, begun=lambda: True, **how):
    """Ask for a context and leave, once it is submitted and has begun."""
    line = asked(served, text, **how)
    serving.wait_until(lambda: any(answers.answers for answers in served.live) and begun())
    line.close()
    serving.wait_until(lambda: not served.live)


def test_a_context_whose_client_left_is_not_made(served):
    before = call(served, "alice")
    with held(served.engine):
        left(served, TEXT + "Left.")
    serving.wait_until(lambda: not served.engine._driver.scheduler.held.num_requests)
    assert call(served, "alice") == before


@pytest.mark.parametrize("known", [False, True])
def test_a_context_stored_when_its_client_left_is_removed_unless_the_key_had_it(served, monkeypatch, known):
    text, begun, gone, stored = f"{TEXT} {known}", Event(), Event(), []
    method = {"method": "knorm"}  # no further passes, between which it would end
    if known:
        call(served, "alice", "POST", body={"text": text, **method})
    before, store = call(served, "alice"), served.engine.store.pin

    def slow(*given):
        begun.set()
        assert gone.wait(60)
        stored.append(store(*given))
        return stored[0]

    monkeypatch.setattr(served.engine.store, "pin", slow)
    left(served, text, begun.is_set, **method)
    gone.set()
    serving.wait_until(lambda: stored and call(served, "alice") == before)
    time.sleep(0.2)  # nothing is removed later, either
    assert call(served, "alice") == before


def test_of_two_clients_that_make_one_context_one_may_leave(served, monkeypatch):
    """While the text that both gave is stored for the second time."""
    begun, gone, stored, removed = Event(), Event(), [], []
    store, remove = served.engine.store.pin, served.engine.store.remove

    def slow(*given):
        if stored:
            begun.set()
            assert gone.wait(60)
        stored.append(store(*given))
        return stored[-1]

    monkeypatch.setattr(served.engine.store, "pin", slow)
    monkeypatch.setattr(served.engine.store, "remove", lambda *given: removed.append(remove(*given)))
    with held(served.engine):
        stays = asked(served, TEXT + "Both.", method="knorm")
        serving.wait_until(lambda: [True for each in served.live if each.answers] == [True])
        leaves = asked(served, TEXT + "Both.", method="knorm")
        serving.wait_until(lambda: [True for each in served.live if each.answers] == [True, True])
    with closing(stays), stays.getresponse() as reply:
        made = json.load(reply)
    assert begun.wait(60)
    leaves.close()
    serving.wait_until(lambda: not served.live)
    gone.set()
    serving.wait_until(lambda: removed)
    assert stored == [made["id"]] * 2 and made in call(served, "alice")[1]["data"]


def test_a_context_whose_client_left_while_it_was_tokenized_is_not_made(served, monkeypatch):
    """Though the engine has stored it before it is told."""
    before, text, submit, stored = call(served, "alice"), TEXT + "Tokenized.", served.engine.submit_pin, []

    def slow(*given, **how):
        serving.wait_until(lambda: not served.live)
        handle = submit(*given, **how)
        handle.result()
        stored.append(handle.request.pinned)
        return handle

    monkeypatch.setattr(served.engine, "submit_pin", slow)
    line = asked(served, text, method="knorm")
    serving.wait_until(lambda: served.live)
    line.close()
    serving.wait_until(lambda: stored and call(served, "alice") == before)
    assert stored[0]


def test_a_context_that_takes_too_long_is_given_up():
    with serving.thread(serving.engine(prefix_cache=10**7), max_seconds=0.3) as served:
        with held(served.engine):
            status, said = call(served, "", "POST", body={"text": TEXT})
        assert status == 408 and said["error"]["code"] == "timeout"
        serving.wait_until(lambda: not served.engine._driver.scheduler.held.num_requests)
        assert call(served, "")[1]["data"] == []
