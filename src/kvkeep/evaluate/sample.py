"""One question of a task, what counts as its answer, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    choices: tuple[str, ...] = ()  # answers to rank by log-likelihood; empty: the answer is written
    max_new_tokens: int = 128
    chat: bool = True  # through the model's chat template, where it has one
    long: bool = False  # the answer is long enough to have to stay within the budget itself
    stops: tuple[str, ...] = ()  # texts that end an answer, beside the model's own end
    speaks: bool = False  # an answer does not begin with an end or a stop
    margin: int | None = None  # cut as LongBench does: the prompt, template apart, leaves so much of the window free
    limits: Mapping[int, int] = field(default_factory=dict)  # or, in windows of these sizes, has so many tokens
    extra: Mapping[str, Any] = field(default_factory=dict)  # for the metric: classes, length
