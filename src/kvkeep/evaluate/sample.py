"""One question of a task, and what counts as its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Sample:
    task: str
    id: str
    question: str
    references: tuple[str, ...]
    metric: str  # a name in METRICS
    context: str = ""  # what the question is about; may be compressed before the question is known
    prefix: str = ""  # how the answer begins
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # for the metric: classes, length
