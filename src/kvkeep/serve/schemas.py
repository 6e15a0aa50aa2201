"""The bodies of requests, as OpenAI's API has them, and the job each asks for.

A field that nobody knows is refused by name, as OpenAI does. One that OpenAI knows and we do not is ignored where that
changes no answer (IGNORED), else refused unless it has its default value (NEUTRAL).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvkeep.serve.job import Job, Prompt

IGNORED = {
    "client_metadata", "include", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "truncation", "user", "verbosity",
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "audio": None, "background": False, "best_of": 1, "conversation": None, "echo": False, "frequency_penalty": 0,
    "function_call": None, "functions": None, "logit_bias": {}, "max_tool_calls": None, "modalities": ["text"],
    "moderation": None, "presence_penalty": 0, "previous_response_id": None, "prompt": None, "suffix": None,
    "web_search_options": None,
}  # fmt: skip
MAX_N = 128
MAX_ITEMS, MAX_TOKENS = 10_000, 2**20  # of a list, before anything else is looked at
MIN_TOP_P = 1e-9  # the engine wants more than 0: the likeliest token alone
Count = Annotated[int, Field(ge=1, le=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(min_length=1, max_length=100)]
T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
MethodName = Annotated[str, Field(max_length=200)]
Budget = Annotated[float, Field(gt=0, le=2**31, allow_inf_nan=False)]


def check_unicode(value: Any) -> Any:
    """JSON can escape half a character, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, RecursionError):
        raise PydanticCustomError("unicode", "a text has half of a surrogate pair, or is nested too deeply") from None
    return value


def from_json(text: str) -> Any:
    """What a text says in JSON; the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise PydanticCustomError("nested", "the JSON in this text is nested too deeply") from None


def _check_json(text: str) -> str:
    check_unicode(from_json(text))
    return text


JsonText = Annotated[str, AfterValidator(_check_json)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, body: Any) -> Any:
        return check_unicode(body)


class Lenient(BaseModel):
    """Clients send back what they were sent, with fields of their own."""

    model_config = ConfigDict(extra="ignore")


class Extension(Strict):
    """Fields of ours."""

    method: MethodName | None = None  # another one than the server's, for this request
    budget: Budget | None = None
    protocol: Literal["agnostic", "aware"] | None = None  # agnostic: what comes before the last message is compressed
    # without it, so that other requests may share it; aware: all of the prompt at once
    context: str | None = None  # the id of a text given to /v1/contexts

    def options(self) -> dict[str, Any]:
        """Of `Engine.submit`."""
        given: dict[str, Any] = {"method": self.method, "budget": _whole(self.budget)}
        if self.protocol is not None:
            given["cache_prefix"] = self.protocol == "agnostic"
        return {name: value for name, value in given.items() if value is not None}


def _whole(number: float | None) -> int | float | None:
    """Tokens are a whole number, a fraction is less than 1."""
    return int(number) if number is not None and number >= 1 and number == int(number) else number


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(Strict):
    """What all APIs have."""

    model: str = Field(examples=["default"])
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kvkeep: Extension = Extension()

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        others = set(body) - {field.alias or name for name, field in cls.model_fields.items()}
        for name in others & NEUTRAL.keys():
            if body[name] is not None and body[name] != NEUTRAL[name]:
                raise PydanticCustomError("unsupported", "Unsupported parameter: {name}", {"name": name})
        return {
            name: value for name, value in body.items() if name not in others or name not in IGNORED | NEUTRAL.keys()
        }

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self) -> dict[str, Any]:
        """Of `Engine.submit`. OpenAI samples unless told otherwise."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else max(self.top_p, MIN_TOP_P)
        return {"temperature": temperature, "top_p": top_p, **self.kvkeep.options()}


class Sampled(Body):
    """What chat and text completions have beyond that."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    max_tokens: Count | None = None

    def options(self) -> dict[str, Any]:
        return super().options() | {"stop": self.stop or ()}


class TextPart(Lenient):
    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_ITEMS, fail_fast=True)]


def text_of(content: Content | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class CalledFunction(Lenient):
    name: str
    arguments: JsonText = "{}"

    def as_template(self) -> dict[str, Any]:
        """Chat templates take the arguments as an object."""
        return {"name": self.name, "arguments": from_json(self.arguments)}


class CalledTool(Lenient):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.as_template()}


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def as_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        message: dict[str, Any] = {"role": self.role.replace("developer", "system"), "content": text_of(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template() for call in self.tool_calls]
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {name: value for name, value in others.items() if value is not None}


class Function(Lenient):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def as_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(include=set(Function.model_fields), exclude_none=True)}


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class NamedFunction(Lenient):
    name: str


class NamedTool(Lenient):
    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"]


class PlainFormat(Lenient):
    type: Literal["text", "json_object"]

    def json_schema(self) -> dict[str, Any] | None:
        return {"type": "object"} if self.type == "json_object" else None


class NamedSchema(Lenient):
    name: str
    schema_: dict[str, Any] = Field({}, alias="schema")


class SchemaFormat(Lenient):
    type: Literal["json_schema"]
    json_schema_: NamedSchema = Field(alias="json_schema")

    def json_schema(self) -> dict[str, Any] | None:
        return self.json_schema_.schema_


class ChatRequest(Sampled):
    """POST /v1/chat/completions"""

    messages: Several[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Choice | NamedTool | None = None

    def job(self) -> Job:
        choice = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        options = self.options() | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})
        return Job(
            model=self.model,
            prompts=[[message.as_template() for message in self.messages]],
            n=self.n or 1,
            stream=bool(self.stream),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            options=options,
            schema=self.response_format.json_schema() if self.response_format else None,
            tools=[tool.function.as_template() for tool in self.tools or ()],
            tool_choice=choice or "auto",
            context=self.kvkeep.context,
        )


class CompletionRequest(Sampled):
    """POST /v1/completions"""

    prompt: str | TokenIds | Several[str] | Several[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    def job(self) -> Job:
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if single else self.prompt
        return Job(
            model=self.model,
            prompts=prompts,
            n=self.n or 1,
            stream=bool(self.stream),
            max_tokens=self.max_tokens or 16,  # OpenAI's default
            seed=self.seed,
            options=self.options() | ({} if self.logprobs is None else {"logprobs": self.logprobs}),
            context=self.kvkeep.context,
        )


class InputMessage(Lenient):
    """Of the responses API."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def as_message(self) -> Message:
        return Message(role=self.role, content=self.content)


class InputCall(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: JsonText

    def as_message(self) -> Message:
        call = CalledTool(id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments))
        return Message(role="assistant", tool_calls=[call])


class InputCallOutput(Lenient):
    type: Literal["function_call_output"]
    call_id: str
    output: Content

    def as_message(self) -> Message:
        return Message(role="tool", content=self.output, tool_call_id=self.call_id)


class FlatSchemaFormat(NamedSchema):
    type: Literal["json_schema"]

    def json_schema(self) -> dict[str, Any] | None:
        return self.schema_


class TextOptions(Lenient):
    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None


class FlatTool(Function):
    type: Literal["function"]


class FlatNamedTool(NamedFunction):
    type: Literal["function"]


class ResponseRequest(Body):
    """POST /v1/responses, of text. Nothing is stored: give the whole conversation."""

    input: str | Several[InputMessage | InputCall | InputCallOutput]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128)] | None = None
    tool_choice: Choice | FlatNamedTool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def messages(self) -> list[Message]:
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        asked = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [*first, *(item.as_message() for item in asked)]

    def job(self) -> Job:
        choice = self.tool_choice.name if isinstance(self.tool_choice, FlatNamedTool) else self.tool_choice
        prompt: Prompt = [message.as_template() for message in self.messages()]
        return Job(
            model=self.model,
            prompts=[prompt],
            stream=bool(self.stream),
            max_tokens=self.max_output_tokens,
            options=self.options() | ({} if self.top_logprobs is None else {"logprobs": self.top_logprobs}),
            schema=self.text.format.json_schema() if self.text and self.text.format else None,
            tools=[tool.as_template() for tool in self.tools or ()],
            tool_choice=choice or "auto",
            context=self.kvkeep.context,
        )


class ContextRequest(Strict):
    """POST /v1/contexts: a text that many requests will ask about, compressed once."""

    model: str = Field(examples=["default"])
    text: Annotated[str, Field(min_length=1)]
    public: bool = False  # requests with any key may ask about it
    method: MethodName | None = None
    budget: Budget | None = None

    def job(self) -> Job:
        """Without an answer."""
        options = Extension(method=self.method, budget=self.budget).options()
        return Job(self.model, [self.text], options=options, stores="public" if self.public else "private")
