"""The body of the responses API: input items in the place of messages, and flat tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, TypeAdapter

from kvkeep.serve.chat_schemas import (
    CalledFunction,
    CalledTool,
    Choice,
    Content,
    Function,
    JsonText,
    Message,
    NamedFunction,
    NamedSchema,
    PlainFormat,
)
from kvkeep.serve.job import Job, Prompt
from kvkeep.serve.schemas import Body, Count, Lenient, Several


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
        prompt: Prompt = [message.as_template() for message in first + self.conversation()]
        return Job(
            model=self.model,
            prompts=[prompt],
            stream=bool(self.stream),
            max_tokens=self.max_output_tokens,
            options=self.options() | ({} if self.top_logprobs is None else {"logprobs": self.top_logprobs}),
            schema=self.text.format.json_schema() if self.text and self.text.format else None,
            tools=[tool.as_template() for tool in self.tools or ()],
            tool_choice=choice or "auto",
            parallel_calls=self.parallel_tool_calls is not False,
            context=self.kvkeep.context,
        )
