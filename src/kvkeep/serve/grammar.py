"""Answers that are JSON: which token may come next, by llguidance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.errors import BadParameter
from kvkeep.model.chat import eos_token_ids

MOST_MATCHERS = 64  # grammars that are compiled for the next answer
FEW_BLANKS = {"x-guidance": {"whitespace_pattern": r"[ \n\t]{0,20}"}}  # small models would never stop writing them
MOST_CHARACTERS = 120_000  # of a grammar; OpenAI's limit for the strings of a schema
FEW_CHARACTERS = 4000  # of a grammar that compiles in a moment, whatever it says
COMPILE_S = 0.3  # of a core, without a vocabulary; an object of 2000 optional properties takes as long
GIVE_UP_S = 10.0  # on a busy machine
TRY_TO_COMPILE = f"""
import signal, sys
from llguidance import LLMatcher
if hasattr(signal, "setitimer"):
    signal.setitimer(signal.ITIMER_PROF, {COMPILE_S})
LLMatcher.validate_grammar(sys.stdin.read())
"""


def check_cost(grammar: str) -> None:
    """Refuse a grammar that would take long to compile. A process finds out that can be ended; a thread cannot."""
    size = f"this JSON schema has {len(grammar)} characters"
    if len(grammar) > MOST_CHARACTERS:
        raise BadParameter(f"{size}, and may have {MOST_CHARACTERS}; give a smaller one.")
    if len(grammar) <= FEW_CHARACTERS:
        return
    try:
        command = [sys.executable, "-c", TRY_TO_COMPILE]
        ended = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=GIVE_UP_S).returncode
    except subprocess.TimeoutExpired:
        ended = -1
    if ended < 0:  # by a signal
        raise BadParameter(f"{size} and takes too long to compile; give fewer properties or alternatives.")


@dataclass(eq=False)
class JsonConstraint:
    """A `Constraint` of the engine: the grammar's state after the tokens so far."""

    matcher: Any
    size: int

    def allowed(self) -> Tensor:
        """The tokens that may follow [vocabulary]; after the JSON, EOS alone. BadParameter: the grammar went too far"""
        packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        _check(self.matcher, "followed")  # one that failed allows EOS, as if the JSON were complete
        bits = torch.from_numpy(np.unpackbits(packed, bitorder="little")[: self.size].astype(bool))
        return torch.nn.functional.pad(bits, (0, self.size - len(bits)))

    def advance(self, token: int) -> None:
        self.matcher.consume_token(token)


@dataclass(eq=False)
class Grammars:
    """Makes grammars for one tokenizer, with llguidance's tables of it."""

    tokenizer: Any
    vocabulary: int  # how many logits the model has
    eos: list[int]
    matchers: dict[str, Any] = field(default_factory=dict)  # by grammar, before their first token

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Grammars:
        """Make the tables, too: they take a second or more, in which a running server answers nobody."""
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        made = cls(tokenizer, vocabulary, sorted(eos_token_ids(model, tokenizer)))
        with suppress(Exception):  # a tokenizer that has none: the first request for JSON says why
            made.tokens  # noqa: B018
        return made

    @cached_property
    def llguidance(self) -> Any:
        import llguidance.hf

        return llguidance

    @cached_property
    def tokens(self) -> Any:
        return self.llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=self.vocabulary, eos_token=self.eos)

    def bytes_of(self, token: int) -> bytes:
        """A token may be part of a character."""
        return self.tokens.decode_bytes([token])

    def of_schema(self, schema: dict[str, Any]) -> Callable[[], JsonConstraint]:
        return self._constraints(self.llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema | FEW_BLANKS)))

    def of_lark(self, lark: str) -> Callable[[], JsonConstraint]:
        return self._constraints(self.llguidance.LLMatcher.grammar_from_lark(lark))

    def _constraints(self, grammar: str) -> Callable[[], JsonConstraint]:
        """A new one for every answer. Another process makes the same of its own `Grammars`."""
        if grammar not in self.matchers:
            check_cost(grammar)
        _check(self._matcher(grammar), "used")
        return partial(self.constraint, grammar)

    def constraint(self, grammar: str) -> JsonConstraint:
        return JsonConstraint(self._matcher(grammar).deep_copy(), self.vocabulary)

    def _matcher(self, grammar: str) -> Any:
        if (known := self.matchers.get(grammar)) is not None:
            return known
        if len(self.matchers) >= MOST_MATCHERS:
            self.matchers.clear()
        made = self.llguidance.LLMatcher(self.tokens, grammar, log_level=0)
        made.compute_bitmask()  # fails if no token can be the first
        self.matchers[grammar] = made
        return made


def _check(matcher: Any, done: str) -> None:
    if matcher.is_error():
        reason = matcher.get_error().splitlines()[0]
        raise BadParameter(f"this JSON schema cannot be {done} ({reason}); leave out what it names, or simplify it.")
