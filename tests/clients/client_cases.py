"""Clients that people use, as they come from PyPI, on a server of a tiny random model: `make clients`.

They run in an environment of their own, without torch and kvkeep; SERVER_PYTHON has both, and serves. A random model
says anything, so what is asked for has to follow from the protocol: schemas, forced calls, counts, joined pieces.
"""

import json
import os
import subprocess
from typing import Literal

import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

SERVE = """
import sys, serving
with serving.thread(serving.engine(prefix_cache=10**8), ["sk-test"], max_tokens=1000) as served:
    print(served.url, flush=True)
    sys.stdin.read()
"""
KEY = "sk-test"
HELLO = "What is a lighthouse for?"
MESSAGES = [{"role": "user", "content": HELLO}]
OBJECT = {"response_format": {"type": "json_object"}, "logit_bias": {str(ord("}") - ord("!") + 2): 100}}  # soon ends


class Answer(BaseModel):
    """What a keeper notes."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "white"]
    geese: Literal[7, 17]


def count_geese(place: Literal["sea", "land"]) -> int:
    """Count the geese over a place."""
    return {"sea": 17, "land": 7}[place]


PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["sea", "land"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "count_geese", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def url():
    tests = os.path.dirname(os.path.dirname(__file__))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([os.environ["SERVER_PYTHON"], "-c", SERVE], env=env, **pipes) as server:
        found = server.stdout.readline().strip()
        assert found.startswith("http"), "the server did not start"
        yield f"{found}/v1"
        server.stdin.close()


@pytest.fixture(scope="module")
def api(url):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chain(url):
    return ChatOpenAI(model="tiny", base_url=url, api_key=KEY, temperature=0, max_retries=0, stream_usage=True)


@pytest.fixture(scope="module")
def index(url):
    how = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, "max_retries": 0}
    return OpenAILike(model="tiny", api_base=url, api_key=KEY, temperature=0, max_tokens=1000, **how)


@pytest.fixture(scope="module")
def ask(url):
    def asked(**how):
        made = {"model": "openai/tiny", "api_base": url, "api_key": KEY, "messages": MESSAGES, "num_retries": 0}
        return litellm.completion(**made | how)

    return asked


class TestOpenAI:
    def test_chat_and_stream(self, api):
        how = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
        whole = api.chat.completions.create(**how)
        chunks = list(api.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == whole.choices[0].message.content and chunks[-1].usage.completion_tokens == 12

    def test_tools_and_schemas(self, api):
        how = {"model": "tiny", "messages": MESSAGES}
        called = api.chat.completions.create(**how, tools=[TOOL], tool_choice="required").choices[0].message
        assert count_geese(**json.loads(called.tool_calls[0].function.arguments)) in (7, 17)
        assert isinstance(api.chat.completions.parse(**how, response_format=Answer).choices[0].message.parsed, Answer)

    def test_responses(self, api):
        first = api.responses.parse(model="tiny", input=HELLO, text_format=Answer)
        assert isinstance(first.output_parsed, Answer)
        again = api.responses.create(model="tiny", input="And?", previous_response_id=first.id, max_output_tokens=5)
        assert again.usage.input_tokens > first.usage.input_tokens


class TestLangChain:
    def test_chat_and_stream(self, chain):
        short = chain.bind(max_tokens=12)
        whole, pieces = short.invoke(HELLO), list(short.stream(HELLO))
        joined = pieces[0]
        for piece in pieces[1:]:
            joined += piece
        assert joined.content == whole.content and len(pieces) > 5
        assert whole.usage_metadata["output_tokens"] == joined.usage_metadata["output_tokens"] == 12
        assert whole.response_metadata["finish_reason"] == "length"

    def test_batches_and_completions(self, chain, url):
        both = chain.bind(max_tokens=5).batch([HELLO, "Who keeps it?"])
        assert [each.usage_metadata["output_tokens"] for each in both] == [5, 5]
        old = OpenAI(model="tiny", base_url=url, api_key=KEY, temperature=0, max_tokens=5, max_retries=0)
        assert old.invoke("abc") == "".join(old.stream("abc"))

    def test_the_loop_of_an_agent(self, chain):
        bound = chain.bind_tools([count_geese], tool_choice="any")
        messages = [HumanMessage("How many geese?")]
        messages.append(bound.invoke(messages))
        (call,) = messages[-1].tool_calls
        assert call["name"] == "count_geese"
        messages.append(ToolMessage(str(count_geese(**call["args"])), tool_call_id=call["id"]))
        assert not chain.bind_tools([count_geese], tool_choice="none").invoke(messages).tool_calls
        joined = None
        for piece in bound.stream(messages):
            joined = piece if joined is None else joined + piece
        assert count_geese(**joined.tool_calls[0]["args"]) in (7, 17)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_schemas(self, chain, method):
        assert isinstance(chain.with_structured_output(Answer, method=method).invoke(HELLO), Answer)

    def test_json_mode(self, chain):
        found = chain.bind(**OBJECT).invoke(HELLO)
        assert isinstance(json.loads(found.content), dict)

    def test_responses(self, url):
        how = {"use_responses_api": True, "use_previous_response_id": True, "max_retries": 0}
        model = ChatOpenAI(model="tiny", base_url=url, api_key=KEY, **how)
        first = model.invoke([HumanMessage(HELLO)], max_tokens=8)
        second = model.invoke([HumanMessage(HELLO), first, HumanMessage("And?")], max_tokens=8)
        assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
        assert isinstance(model.with_structured_output(Answer).invoke(HELLO), Answer)


class TestLlamaIndex:
    def test_chat_and_stream(self, index):
        asked = [ChatMessage(role="user", content=HELLO)]
        whole = index.chat(asked, max_tokens=12).message.content
        assert [*index.stream_chat(asked, max_tokens=12)][-1].message.content == whole
        assert "".join(piece.delta for piece in index.stream_complete(HELLO, max_tokens=12)) == whole
        assert index.complete(HELLO, max_tokens=12).text == whole

    def test_tools(self, index):
        tools = [FunctionTool.from_defaults(count_geese)]
        reply = index.chat_with_tools(tools, user_msg="How many geese?", tool_required=True)
        (call,) = index.get_tool_calls_from_response(reply)
        assert call.tool_name == "count_geese" and count_geese(**call.tool_kwargs) in (7, 17)
        *_, last = index.stream_chat_with_tools(tools, user_msg="How many geese?", tool_required=True)
        assert index.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs

    def test_schemas(self, index):
        assert isinstance(index.structured_predict(Answer, PromptTemplate(HELLO)), Answer)
        found = index.chat([ChatMessage(role="user", content=HELLO)], **OBJECT)
        assert isinstance(json.loads(found.message.content), dict)


class TestLiteLLM:
    def test_chat_and_stream(self, ask, url):
        how = {"temperature": 0, "max_tokens": 12, "seed": 1, "frequency_penalty": 0.5, "logit_bias": {"70": 1}}
        whole = ask(**how)
        chunks = list(ask(**how, stream=True, stream_options={"include_usage": True}))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == whole.choices[0].message.content and whole.usage.completion_tokens == 12
        rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert rebuilt.choices[0].message.content == said and rebuilt.usage.completion_tokens == 12
        old = litellm.text_completion(
            model="text-completion-openai/tiny", api_base=url, api_key=KEY, prompt="abc", max_tokens=5
        )
        assert old.usage.completion_tokens == 5

    def test_tools_and_schemas(self, ask):
        (call,) = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == "count_geese" and count_geese(**json.loads(call.function.arguments)) in (7, 17)
        Answer.model_validate_json(ask(response_format=Answer).choices[0].message.content)
        assert isinstance(json.loads(ask(**OBJECT).choices[0].message.content), dict)

    def test_an_error_is_its_own(self, ask):
        with pytest.raises(litellm.BadRequestError, match="top_p"):
            ask(top_p=7)
        with pytest.raises(litellm.AuthenticationError):
            ask(api_key="sk-wrong")
