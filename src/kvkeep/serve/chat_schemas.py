"""The bodies of chats and of the responses API, which has input items in the place of messages, and flat tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from kvkeep.serve.job import Job
from kvkeep.serve.schemas import MAX_ITEMS, Body, Count, Lenient, Sampled, Several, Strict, check_unicode, from_json


def _check_json(text: str) -> str:
    check_unicode(from_json(text))
    return text


JsonText = Annotated[str, AfterValidator(_check_json)]


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
        """The message as chat templates take it."""
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
    parallel_tool_calls: bool | None = None

    def job(self) -> Job:
        choice = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return self.job_of(
            [[message.as_template() for message in self.messages]],
            (self.top_logprobs or 0) if self.logprobs else None,
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            schema=self.response_format.json_schema() if self.response_format else None,
            tools=[tool.function.as_template() for tool in self.tools or ()],
            tool_choice=choice or "auto",
            parallel_calls=self.parallel_tool_calls is not False,
        )


class TokenizeRequest(Strict):
    """POST /tokenize, as vLLM has it: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Several[Message] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_special_tokens: bool = True  # of a prompt; those of a chat are its template's
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give a prompt, or messages")
        return self


class InputMessage(Lenient):
    """A message of the responses API."""

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


InputItem = InputMessage | InputCall | InputCallOutput
ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ResponseRequest(Body):
    """POST /v1/responses, of text."""

    input: str | Several[InputItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128)] | None = None
    tool_choice: Choice | FlatNamedTool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    _before: list[Message] = PrivateAttr(default_factory=list)

    def go_on_after(self, messages: list[Message]) -> None:
        """Continue the conversation of the previous response; its instructions are not part of it."""
        self._before = messages

    def conversation(self, output: list[Any] | None = None) -> list[Message]:
        """What was said before, what is said now, and what was answered: output items as they are sent."""
        said = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return self._before + [item.as_message() for item in (*said, *ITEMS.validate_python(output or []))]

    def job(self) -> Job:
        choice = self.tool_choice.name if isinstance(self.tool_choice, FlatNamedTool) else self.tool_choice
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        return self.job_of(
            [[message.as_template() for message in first + self.conversation()]],
            self.top_logprobs,
            max_tokens=self.max_output_tokens,
            schema=self.text.format.json_schema() if self.text and self.text.format else None,
            tools=[tool.as_template() for tool in self.tools or ()],
            tool_choice=choice or "auto",
            parallel_calls=self.parallel_tool_calls is not False,
        )
