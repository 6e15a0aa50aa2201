"""`kvkeep inspect`: the same question to several methods, and what each of them kept."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

import kvkeep
from kvkeep.cache.cache import Cache
from kvkeep.compress.parse import parse_budget
from kvkeep.engine.engine import Engine
from kvkeep.errors import BadInput, BadParameter, KvkeepError, QueryAwareWarning
from kvkeep.model.chat import context_ids, encode, join_question, question_ids, split_template
from kvkeep.model.hf_cache import context_length
from kvkeep.model.user_text import ids_of, token_texts
from kvkeep.pages.html import pack_bits
from kvkeep.pages.inspection import (
    TOP,
    Cost,
    Inspection,
    MethodFacts,
    TokenValues,
    Windows,
    agreement,
    answer_words,
    found_of,
    histogram,
    kept_mask,
    mass_of,
    most_attended,
)
from kvkeep.pages.method_values import answer_attention, evicting, method_values, pack_values, window_retrieval
from kvkeep.terminal import AnswerTimer

PROTOCOLS = ("aware", "agnostic")  # the question is known before anything is evicted, or it is not
FULL = "full"
ATTENTION = "of the answer to each token, in the full cache, averaged over the answer's tokens"

Config = tuple[str, Any]  # a method and its budget
Say = Callable[[str], None]


def check_protocol(name: str) -> None:
    if name not in PROTOCOLS:
        raise BadParameter(f"protocol '{name}' is not known; use {' or '.join(PROTOCOLS)}.")


@dataclass(frozen=True)
class Outcome:
    """A method's answer, and the tokens that its cache then held."""

    facts: MethodFacts
    mask: Tensor | None = None  # [layers, kv_heads, tokens] bool
    answer: tuple[int, ...] = ()  # token ids
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Inspector:
    """Asks one question about one document."""

    model: Any
    tokenizer: Any
    document: str
    question: str
    protocol: str = "aware"
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        check_protocol(self.protocol)

    def inspect(self, configs: Sequence[Config], name: str, say: Say = lambda text: None) -> Inspection:
        """name: of the model"""
        context, ids = self._ids()
        outcomes = [self._outcome(config, len(ids), say) for config in [(FULL, None), *configs]]
        if all(outcome.mask is None for outcome in outcomes[1:]):
            raise BadInput(outcomes[-1].facts.error or "there is nothing to compare; give a method beside full.")
        attention, note = self._attention(ids, outcomes, say)
        compressed = ids if self.protocol == "aware" else ids[:context]
        values = self._values(configs, compressed, say)
        windows = {outcome.facts.name: self._windows(outcome, compressed, len(ids), say) for outcome in outcomes}
        texts, parts = token_texts(self.tokenizer, ids), self._parts(context, ids)
        reference = next(outcome.facts.answer for outcome in outcomes if outcome.answer)
        words = answer_words(texts, parts["document"], self.question, reference)
        facts = [self._facts(outcome, outcomes[0].facts, attention, words) for outcome in outcomes]
        compared = [outcome for outcome in outcomes[1:] if outcome.mask is not None]
        shown = next(outcome for outcome in outcomes if outcome.mask is not None)
        return Inspection(
            model=name,
            version=kvkeep.__version__,
            protocol=self.protocol,
            question=self.question,
            tokens=texts,
            parts=parts,
            layers=list(shown.layers),
            kv_heads=0 if shown.mask is None else shown.mask.shape[1],
            top=min(TOP, len(ids)),
            methods=[replace(each, values=values.get(each.name, ()), windows=windows.get(each.name)) for each in facts],
            compared=[outcome.facts.name for outcome in compared],
            agreement=agreement([outcome.mask for outcome in compared if outcome.mask is not None]),
            answer_tokens=words,
            attended=[] if attention is None else most_attended(attention, parts["document"], TOP),
            attention=None if attention is None else TokenValues("attention", ATTENTION, pack_values(attention)),
            note=note,
        )

    def _ids(self) -> tuple[int, list[int]]:
        """Tokens of the template's beginning and the document, and the ids of the whole prompt."""
        context = context_ids(self.tokenizer, self.document)
        if self.protocol == "agnostic":
            return len(context), context + question_ids(self.tokenizer, self.document, self.question, context)
        return len(context), encode(self.tokenizer, join_question(self.document, self.question))[0].tolist()

    def _parts(self, context: int, ids: list[int]) -> dict[str, tuple[int, int]]:
        before, after = (len(ids_of(self.tokenizer, text)) for text in split_template(self.tokenizer))
        return {"document": (before, context), "question": (context, len(ids) - after)}

    def _outcome(self, config: Config, tokens: int, say: Say) -> Outcome:
        method, budget = config
        say(f"{method}: prefill and answer")
        known = parse_budget(method, budget)[0]
        facts = MethodFacts(method, budget, known.keeps, known.retrieval is not None)
        try:
            cache, answer, timer = self._ask(config)
        except KvkeepError as error:
            return Outcome(replace(facts, error=" ".join(str(error).split())))
        mask = kept_mask(cache, tokens)
        report = cache.report()
        rate = timer.rate(len(answer))
        cost = Cost(
            kept_per_head=round(float(mask.sum(-1).float().mean()), 2),
            bytes=report.bytes,
            full_bytes=report.full_bytes,
            host_bytes=report.host_bytes,
            first_token_s=round(timer.first_token_s, 3),
            tokens_per_s=None if rate is None else round(rate, 2),
            new_tokens=len(answer),
        )
        text = self.tokenizer.decode(answer, skip_special_tokens=True).strip()
        return Outcome(replace(facts, answer=text, cost=cost), mask, tuple(answer), tuple(cache.compressed_layers))

    def _ask(self, config: Config) -> tuple[Cache, list[int], AnswerTimer]:
        """The cache when the answer is complete, the answer's ids, and its times."""
        with Engine(self.model, self.tokenizer, *config, history=None) as engine:
            timer = AnswerTimer()
            if self.protocol == "aware":
                texts = engine.stream(
                    self.document, question=self.question, max_new_tokens=self.max_new_tokens, progress=False
                )
                deque(timer.watch(texts), maxlen=0)
                return engine.cache, engine.answer.ids, timer
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", QueryAwareWarning)  # to see that is why one looks
                context = engine.read(self.document, progress=False)
                handle = context.submit(self.question, max_new_tokens=self.max_new_tokens)
                deque(timer.watch(handle), maxlen=0)
            return handle.cache, handle.request.answer.ids, timer

    def _attention(self, ids: list[int], outcomes: Sequence[Outcome], say: Say) -> tuple[Tensor | None, str]:
        """What the answer of `full` attended to, or why that is not known."""
        if not outcomes[0].answer:
            return None, f"What the answer attended to is not known without a full cache: {outcomes[0].facts.error}"
        say("what the answer attends to in the full cache")
        return answer_attention(self.model, ids, list(outcomes[0].answer)), ""

    def _values(self, configs: Sequence[Config], ids: list[int], say: Say) -> dict[str, tuple[TokenValues, ...]]:
        if len(ids) > context_length(self.model):
            return {}
        say("scores of all methods")
        return method_values(self.model, self.tokenizer, ids, evicting(configs))

    def _windows(self, outcome: Outcome, ids: list[int], tokens: int, say: Say) -> Windows | None:
        if not outcome.facts.retrieves or outcome.mask is None:
            return None
        say(f"{outcome.facts.name}: window by window")
        method, budget = parse_budget(outcome.facts.name, outcome.facts.budget)
        known = self.question if self.protocol == "aware" else None
        return window_retrieval(self.model, self.tokenizer, ids, tokens, method, budget, known)

    def _facts(self, outcome: Outcome, full: MethodFacts, attention: Tensor | None, words: list[int]) -> MethodFacts:
        mask = outcome.mask
        if mask is None:
            return outcome.facts
        return replace(
            outcome.facts,
            differs=differs(outcome.facts, full),
            kept=None if outcome.facts.name == FULL else pack_bits(mask),
            counts=mask.sum(-1).tolist(),
            histogram=histogram(mask),
            found=None if attention is None else found_of(mask, attention, TOP),
            mass=None if attention is None else mass_of(mask, attention),
            answer_kept=round(float(mask[..., words].float().mean()), 4) if words else None,
        )


def differs(facts: MethodFacts, full: MethodFacts) -> bool:
    """Whether an answer has other words than that of the full cache."""
    return not full.error and not facts.error and facts.answer.split() != full.answer.split()
