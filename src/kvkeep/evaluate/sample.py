"""One question of a task, what counts as its answer, and how it is asked: by itself, or as a turn of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.model.chat import join_question

Messages = list[dict[str, str]]  # of a chat: role and content


@dataclass(frozen=True)
class Sample:
    """The prompt is context + question + prefix, in this order and with nothing between them."""

    task: str
    id: str
    question: str
    references: tuple[str, ...]
    metric: str  # a name in METRICS
    context: str = ""  # what the question is about; may be compressed before the question is known
    prefix: str = ""  # how the answer begins; after the assistant's header where there is one
    choices: tuple[str, ...] = ()  # answers to rank by log-likelihood; empty: the answer is generated
    max_new_tokens: int = 128
    chat: bool = True  # through the model's chat template, where it has one
    long: bool = False  # the answer, too, has to stay within the budget
    stops: tuple[str, ...] = ()  # texts that end an answer, beside the model's own end
    non_empty: bool = False  # an end token or a stop cannot be the first token of the answer
    margin: int | None = None  # truncated as LongBench does: the prompt, template apart, leaves so many tokens free
    limits: Mapping[int, int] = field(default_factory=dict)  # or, at these context lengths, has so many tokens
    extra: Mapping[str, Any] = field(default_factory=dict)  # for the metric: classes, length


@dataclass(frozen=True)
class Turn(Sample):
    """A question of a conversation about a text, asked after the turns before it were answered."""

    talk: int = 0  # the conversation, of those about the text
    turn: int = 1
    place: str = "user"  # whose message has the text: the user's first, or the system's

    def messages(self, before: Messages) -> Messages:
        """The conversation up to this question. before: that of the turn before, with its answer; empty at the first"""
        if before:
            return [*before, {"role": "user", "content": self.question}]
        if self.place == "system":
            return [{"role": "system", "content": self.context}, {"role": "user", "content": self.question}]
        return [{"role": "user", "content": join_question(self.context, self.question)}]
