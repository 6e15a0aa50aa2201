"""What a client asks for, in the engine's words, whatever the API it asks through."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from kvkeep.errors import BadParameter

Prompt = str | list[int] | list[dict[str, Any]]  # a text as it is, token ids, or the messages of a chat
LONG_BEGINNING = 4000  # characters that requests have in common


def texts_of(prompt: Prompt) -> list[str]:
    """All that a tokenizer reads of a prompt."""
    if isinstance(prompt, str):
        return [prompt]
    messages = [each for each in prompt if isinstance(each, dict)]
    calls = [json.dumps(each["tool_calls"]) for each in messages if each.get("tool_calls")]
    return [*(each["content"] for each in messages), *calls]


@dataclass(frozen=True)
class Job:
    """`n` answers to each of the prompts."""

    model: str
    prompts: list[Prompt]
    n: int = 1
    stream: bool = False
    max_tokens: int | None = None  # of an answer; None: as many as the server allows
    seed: int | None = None  # of the first answer, the next has one more; None: a random one
    options: dict[str, Any] = field(default_factory=dict)  # of `Engine.submit`: temperature, stop, method, budget, …
    schema: dict[str, Any] | None = None  # of the JSON that an answer has to be
    tools: list[dict[str, Any]] = field(default_factory=list)  # functions, as the chat template takes them
    tool_choice: str = "auto"  # "none", "auto", "required", or the name of the function to call
    parallel_calls: bool = True  # an answer may call several tools
    context: str | None = None  # the id of a text that was read before, which the prompts continue
    echo: bool = False  # an answer's text begins with its prompt
    stores: Literal["private", "public"] | None = None  # the prompt is a text to store, for its key or for all

    @property
    def num_answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def calls_tools(self) -> bool:
        """Whether tools may be called. If not, the template shows them all the same: requests share its beginning."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar has to be compiled for its answers."""
        return self.schema is not None or (self.calls_tools and self.tool_choice != "auto")

    def num_characters(self, prompt: Prompt) -> int:
        """The characters of one of the prompts, with the tools that are shown before it."""
        return sum(map(len, texts_of(prompt))) + (len(json.dumps(self.tools)) if self.tools else 0)

    def check_context(self) -> None:
        """A context was compressed before: refuse what would have to come earlier."""
        given = {"protocol": "cache_prefix" in self.options, "tools": bool(self.tools)}
        given |= {name: name in self.options for name in ("method", "budget")}
        if wrong := sorted(name for name, is_given in given.items() if is_given):
            raise BadParameter(f"{', '.join(wrong)} cannot be given with a context, which has its own; leave it out.")


def beginning(asked: dict[str, Any]) -> str:
    """What a request has in common with those of its conversation, or about its long text.

    It is the first LONG_BEGINNING characters of all that comes up to the first message of the user.
    """
    found = ""
    given = [asked.get(name) for name in ("instructions", "input", "messages", "prompt", "text")]
    parts = [part for each in given for part in (each if isinstance(each, list) else [each]) if part is not None]
    for part in parts[:LONG_BEGINNING]:
        found += json.dumps(part, ensure_ascii=False)
        if len(found) >= LONG_BEGINNING or (isinstance(part, dict) and part.get("role") == "user"):
            break
    return found[:LONG_BEGINNING]
