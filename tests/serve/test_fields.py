"""Fields of OpenAI's and vLLM's APIs that clients rely on."""

import asyncio
import json
import urllib.error
import urllib.request

import openai
import pytest
import serving
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response

from kvkeep.serve.access import Limits
from kvkeep.serve.chat_schemas import Message
from kvkeep.serve.job import Job
from kvkeep.serve.response_reply import ResponseStore
from kvkeep.serve.tools import ToolFormat

HELLO = [{"role": "user", "content": "Hello there, what is the time?"}]
COLD = {"model": "tiny", "temperature": 0, "max_tokens": 12}
BRIEF = {"model": "tiny", "temperature": 0, "max_output_tokens": 6}


@pytest.fixture(scope="module")
def served():
    with serving.thread(serving.engine(), ["alice", "bob"], max_tokens=512) as found:
        yield found


@pytest.fixture(scope="module")
def api(served):
    with serving.client(served, "alice") as found:
        yield found


def post(served, path, body, key="alice"):
    """-> status, object"""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(served.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def tokens_of(served, text):
    return served.engine.tokenizer(text).input_ids


@pytest.mark.parametrize(
    "field",
    [
        {"logit_bias": {"70": 100}},
        {"frequency_penalty": -2.0},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 0.5},
        {"ignore_eos": True, "logit_bias": {"1": 100}},
        {"logit_bias": {"1": 100, "80": 90}, "min_tokens": 5},
        {"stop_token_ids": "second"},
        {"temperature": 2.0, "seed": 1, "top_k": 2},
        {"temperature": 1.0, "seed": 1, "min_p": 0.9},
    ],
    ids=lambda field: "+".join(field),
)
def test_a_field_does_what_the_engines_option_does(served, api, field):
    plain = api.chat.completions.create(messages=HELLO, **COLD).choices[0].message.content
    if "stop_token_ids" in field:
        said = served.engine.submit(HELLO, max_new_tokens=12)
        assert said.result() == plain
        field = {"stop_token_ids": said.request.answer.ids[1:2]}
    chat = api.chat.completions.create(messages=HELLO, **COLD | {"extra_body": field}).choices[0]
    options = {"max_new_tokens": 12, **field}
    if "logit_bias" in field:
        options["logit_bias"] = {int(token): bias for token, bias in field["logit_bias"].items()}
    handle = served.engine.submit(HELLO, **options)
    assert chat.message.content == handle.result() != plain
    assert chat.finish_reason == handle.request.finish_reason
    prompt = served.engine.encode(HELLO[0]["content"]).tolist()
    text = api.completions.create(prompt=prompt, **COLD | {"extra_body": field}).choices[0]
    assert (text.text, text.finish_reason) == (chat.message.content, chat.finish_reason)


def test_neutral_values_change_nothing(api):
    neutral = {
        "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "top_k": -1,
        "min_p": 0, "min_tokens": 0, "stop_token_ids": [], "ignore_eos": False, "parallel_tool_calls": True,
    }  # fmt: skip
    plain = api.chat.completions.create(messages=HELLO, **COLD).choices[0].message.content
    for body in (neutral, dict.fromkeys(neutral)):
        assert api.chat.completions.create(messages=HELLO, **COLD, extra_body=body).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"258": 1}),
        ("logit_bias", [1]), ("frequency_penalty", 2.01), ("presence_penalty", -2.01), ("repetition_penalty", 0),
        ("top_k", -2), ("min_p", 1.1), ("min_p", -0.1), ("min_tokens", -1), ("min_tokens", 13),
        ("stop_token_ids", [-1]), ("stop_token_ids", [258]), ("ignore_eos", "perhaps"), ("parallel_tool_calls", 3),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(api, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(messages=HELLO, **COLD, extra_body={field: value})
    assert field in caught.value.body["message"]


def test_echo(served, api):
    plain = api.completions.create(prompt=["abc", "Geese"], n=2, **COLD)
    echoed = api.completions.create(prompt=["abc", "Geese"], n=2, echo=True, **COLD)
    assert [choice.text for choice in echoed.choices] == [
        prompt + choice.text for prompt, choice in zip(["abc", "abc", "Geese", "Geese"], plain.choices, strict=True)
    ]
    assert echoed.usage == plain.usage
    ids = tokens_of(served, "Geese")
    streamed = list(api.completions.create(prompt=ids, echo=True, stream=True, **COLD))
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.choices[2].text
    with pytest.raises(openai.BadRequestError, match="echo"):
        api.completions.create(prompt="abc", echo=True, logprobs=1, **COLD)


def test_parallel_tool_calls(api, monkeypatch):
    """A grammar that makes two calls of the model's answer."""
    grammar = ToolFormat.grammar

    def twice(self, functions):
        start, call = grammar(self, functions).split("\n", 1)
        return f"{start} {start.removeprefix('start: ')}\n{call}"

    monkeypatch.setattr(ToolFormat, "grammar", twice)
    tool = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    how = {"model": "tiny", "messages": HELLO, "tools": [{"type": "function", "function": tool}], "seed": 1}
    flat = {"model": "tiny", "input": "Time?", "tools": [{"type": "function", **tool}], "tool_choice": "required"}
    for parallel, most in ((True, 2), (False, 1)):
        asked = how | {"tool_choice": "required", "parallel_tool_calls": parallel}
        choice = api.chat.completions.create(**asked).choices[0]
        deltas = [chunk.choices[0].delta for chunk in api.chat.completions.create(**asked, stream=True)]
        streamed = [call for delta in deltas for call in delta.tool_calls or ()]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        response = api.responses.create(**flat, parallel_tool_calls=parallel)
        assert len(choice.message.tool_calls) == len(streamed) == len(response.output) == most
        assert response.parallel_tool_calls is parallel


def test_a_response_continues_another(api):
    first = api.responses.create(input="Who counted the geese?", instructions="Be brief.", **BRIEF)
    whole = [{"role": "user", "content": "Who counted the geese?"}, *first.output, {"role": "user", "content": "When?"}]
    want = api.responses.create(input=whole, **BRIEF)  # without the instructions, which are of one response
    second = api.responses.create(input="When?", previous_response_id=first.id, **BRIEF)
    assert second.output_text == want.output_text and second.usage.input_tokens == want.usage.input_tokens
    assert second.previous_response_id == first.id
    *_, last = api.responses.create(input="Where?", previous_response_id=second.id, stream=True, **BRIEF)
    third = last.response
    assert third.usage.input_tokens > second.usage.input_tokens
    for response in (first, second):
        found = api.responses.with_raw_response.retrieve(response.id)
        assert Response.model_validate_json(found.text, strict=True) == response
    assert api.responses.retrieve(third.id).output_text == third.output_text


def test_a_response_with_a_tool_call_is_continued_by_its_result(api):
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "name": "clock", "parameters": nothing}
    called = api.responses.create(model="tiny", input="Time?", tools=[tool], tool_choice="required")
    result = {"type": "function_call_output", "call_id": called.output[0].call_id, "output": "12:30"}
    how = {"tools": [tool], "tool_choice": "none", **BRIEF}
    whole = api.responses.create(input=[{"role": "user", "content": "Time?"}, *called.output, result], **how)
    short = api.responses.create(input=[result], previous_response_id=called.id, **how)
    assert short.output_text == whole.output_text and short.usage.total_tokens == whole.usage.total_tokens


def test_a_response_is_of_its_key_and_can_be_removed(served, api):
    made = api.responses.create(input="Hello", **BRIEF)
    unstored = api.responses.create(input="Hello", store=False, **BRIEF)
    with serving.client(served, "bob") as bob:
        for asks in (
            lambda: bob.responses.retrieve(made.id),
            lambda: bob.responses.delete(made.id),
            lambda: bob.responses.create(input="And?", previous_response_id=made.id, **BRIEF),
            lambda: api.responses.create(input="And?", previous_response_id=unstored.id, **BRIEF),
            lambda: api.responses.retrieve(unstored.id),
            lambda: api.responses.retrieve("resp_none"),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                asks()
    api.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(made.id)


def test_the_least_used_responses_expire():
    def stored(**limits):
        store = ResponseStore(**limits)
        for name in "abc":
            store.put("alice", {"id": name}, [Message(role="user", content="x" * 100)])
            store.put("bob", {"id": name}, [])
            if "a" in store.by_owner["alice"]:
                store.get("alice", "a")
        return store

    def names(store, owner):
        return sorted(store.by_owner[owner])

    few = stored(most=2)
    assert names(few, "alice") == ["a", "c"] and names(few, "bob") == ["b", "c"]
    assert names(stored(most_bytes=500), "alice") == ["a", "c"]
    small = stored(most_bytes=50)
    assert names(small, "alice") == []


def test_texts_are_tokenized_and_back(served):
    prompt = {"model": "tiny", "prompt": "Gänse <s>"}
    status, found = post(served, "/tokenize", prompt | {"return_token_strs": True})
    assert (status, found["tokens"], found["max_model_len"]) == (200, tokens_of(served, "Gänse <s>"), serving.WINDOW)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert post(served, "/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": "Gänse <s>"})
    status, found = post(served, "/tokenize", {"messages": HELLO})
    assert found["tokens"] == served.engine.encode(HELLO[0]["content"]).tolist() and found["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/tokenize", {}, 400, "give a prompt, or messages"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "give a prompt, or messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
        ("/tokenize", {"prompt": "a" * 100_000}, 400, "context length"),
        ("/detokenize", {"tokens": [258]}, 400, "this model's are 0 to 257"),
        ("/detokenize", {"tokens": []}, 400, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(served, path, body, status, said):
    found, error = post(served, path, body)
    assert found == status and said in error["error"]["message"]
    assert post(served, path, body, key="mallory")[0] == 401


def test_tokenizing_counts_as_an_answer_under_way(served, monkeypatch):
    async def hold():
        return served.admit(served.keys.owner("alice"), Job("tiny", ["x"]))

    async def end(place):
        place.close()

    monkeypatch.setattr(served, "limits", Limits(max_answers=1))
    place = asyncio.run(hold())
    try:
        assert post(served, "/tokenize", {"prompt": "a"})[0] == 429
        assert post(served, "/tokenize", {"prompt": "a"}, key="bob")[0] == 200
    finally:
        asyncio.run(end(place))
    assert post(served, "/tokenize", {"prompt": "a"})[0] == 200


def test_what_a_client_is_told_of_the_model(api):
    assert api.models.retrieve("tiny").max_model_len == serving.WINDOW
    answers = [api.chat.completions.create(messages=HELLO, **COLD), api.completions.create(prompt="abc", **COLD)]
    chunks = list(api.chat.completions.create(messages=HELLO, stream=True, **COLD))
    (fingerprint,) = {each.system_fingerprint for each in answers + chunks}
    assert fingerprint.startswith("fp_")


@pytest.mark.parametrize("asks", [True, False])
def test_usage_is_null_until_the_last_chunk_of_a_stream(api, asks):
    options = {"stream_options": {"include_usage": asks}, "stream": True, **COLD}
    chats = list(api.chat.completions.create(messages=HELLO, **options))
    for chunk in chats:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    for chunks in (chats, list(api.completions.create(prompt="abc", **options))):
        usage = [chunk.model_dump(exclude_unset=True).get("usage", "none") for chunk in chunks]
        if asks:
            assert usage[:-1] == [None] * (len(chunks) - 1) and usage[-1]["completion_tokens"] == 12
        else:
            assert set(usage) == {"none"}


def test_an_exact_answer_is_that_of_full(served, api):
    """And `usage` and `/metrics` say how many guesses were right."""
    text = [{"role": "system", "content": "The geese. " * 30}, *HELLO]

    def ask(**how):
        reply = api.chat.completions.create(messages=text, **COLD, extra_body={"kvkeep": how})
        return reply.choices[0].message.content, reply.usage.kvkeep

    before, (whole, usage) = served.metrics.exact["passes"]._value.get(), ask(method="full")
    mine, found = ask(exact=True, budget=16)
    assert mine == whole != ask(budget=16)[0] and "exact" not in usage
    found = found["exact"]
    assert found["passes"] > 0 and 0 <= found["right"] <= found["guessed"]
    with urllib.request.urlopen(served.url + "/metrics") as reply:
        lines = dict(line.split() for line in reply.read().decode().splitlines() if line.startswith("kvkeep_exact"))
    assert float(lines["kvkeep_exact_passes_total"]) == before + found["passes"]
    assert float(lines["kvkeep_exact_right_tokens_total"]) == found["right"]
    pieces = api.chat.completions.create(messages=text, **COLD, stream=True, extra_body={"kvkeep": {"exact": True}})
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    for path, asked in (("completions", {"prompt": "Geese."}), ("responses", {"input": "Geese."})):
        most = "max_tokens" if path == "completions" else "max_output_tokens"
        status, reply = post(served, f"/v1/{path}", {"model": "tiny", most: 4, "kvkeep": {"exact": True}, **asked})
        assert status == 200 and reply["usage"]["kvkeep"]["exact"]["guessed"] == 0  # nothing is evicted


def test_what_cannot_be_exact_is_refused_by_name(served):
    for how, said in (({"method": "quest"}, "cannot work with 'quest'"), ({"exact": 2}, "kvkeep.exact")):
        asked = {"model": "tiny", "messages": HELLO, "kvkeep": {"exact": True, **how}}
        status, reply = post(served, "/v1/chat/completions", asked)
        assert status == 400 and said in reply["error"]["message"]
