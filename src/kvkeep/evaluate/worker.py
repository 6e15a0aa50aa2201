"""Samples about one text -> result rows: every config's answer, its score, and what that score depends on.

With choices, the prompt is prefilled and compressed, then each choice is scored. Conversations are held by
`evaluate/talk.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse_budget
from kvkeep.engine.progress import now
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import BadInput
from kvkeep.evaluate.item import Item, TimedRow, budget_unit, row_key, setting
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.metrics.math import extract_answer
from kvkeep.evaluate.prefill import Config, PrefilledContext, prefill
from kvkeep.evaluate.prompt import Prompt, build_prompt
from kvkeep.evaluate.sample import Sample, Turn
from kvkeep.evaluate.talk import converse
from kvkeep.evaluate.tasks.choice import pairs
from kvkeep.model.chat import eos_token_ids
from kvkeep.model.hf_cache import UNLIMITED, context_length
from kvkeep.model.user_text import ids_of

REASONED = ("math", "aime")  # metrics of answers that follow some reasoning
REPORTED = ("kept_per_head", "coverage", "bytes", "peak_bytes", "full_bytes", "host_bytes", "index_bytes")


@dataclass(frozen=True)
class Worker:
    """Answers items; an answer does not depend on the worker, nor on the order of items."""

    model: Any
    tokenizer: Any
    configs: Seq[Config]
    share: bool = True  # one prefill for all configs, one batch for their answers
    max_length: int | None = None  # tokens of a prompt; None: the model's context length
    beyond_window: bool = False  # methods that extend the context length get the whole prompt
    own_schedule: bool = False  # answers, too, are evicted from where a method does so while decoding

    def __call__(self, item: Item) -> Iterator[TimedRow]:
        """Rows sample by sample."""
        first = item.samples[0]
        if isinstance(first, Turn):
            return converse(self.model, self.tokenizer, item, self.methods, self.own_schedule)
        return self._rank_choices(item) if first.choices else self._generate(item)

    @property
    def context_length(self) -> int:
        return min(context_length(self.model), self.max_length or UNLIMITED)

    @cached_property
    def methods(self) -> dict[Config, Method]:
        return {config: parse_budget(*config)[0] for config in self.configs}

    @cached_property
    def scheduler(self) -> Scheduler:
        return Scheduler(self.model, eos_token_ids(self.model, self.tokenizer))

    @property
    def configs_by_limit(self) -> dict[int, list[Config]]:
        """Group configs by the most tokens of prompt and answer they can attend to."""
        found: dict[int, list[Config]] = {}
        for config, method in self.methods.items():
            beyond = self.beyond_window and method.extends_context
            found.setdefault(UNLIMITED if beyond else context_length(self.model), []).append(config)
        return found

    def _prefill(self, prompt: Prompt, sample: Sample, configs: Seq[Config]) -> list[PrefilledContext]:
        """Query-aware methods are given the question before prefill, where it is part of the prefilled ids."""
        known = "" if len(prompt.question) else _asked(sample)
        methods = {config: self.methods[config] for config in configs}
        evicting = {config for config, method in methods.items() if self._evicts_answer(sample, method)}
        return prefill(self.model, self.tokenizer, prompt.context, methods, evicting, self.share, known)

    def _evicts_answer(self, sample: Sample, method: Method) -> bool:
        """Whether an answer, too, has to stay within the budget."""
        return sample.long or (self.own_schedule and method.schedule.every is not None and not sample.choices)

    def _generate(self, item: Item) -> Iterator[TimedRow]:
        """Every sample's answers, from one prefill wherever the context is the same to the last token."""
        prefilled: dict[int, tuple[Tensor, list[PrefilledContext]]] = {}
        for sample, (limit, configs) in product(item.samples, self.configs_by_limit.items()):
            prompt = build_prompt(self.tokenizer, sample, item.protocol, limit, self.max_length)
            if limit not in prefilled or not prefilled[limit][0].equal(prompt.context):
                prefilled[limit] = prompt.context, self._prefill(prompt, sample, configs)
            for context, ids, timed in self._decode(prefilled[limit][1], prompt, sample):
                answer = _until_stop(self.tokenizer.decode(ids, skip_special_tokens=True), sample.stops)
                score = METRICS[sample.metric](answer, list(sample.references), **sample.extra)
                facts = {"score": score, "answer": answer, "new_tokens": len(ids)}
                facts |= {"cut": len(ids) == sample.max_new_tokens}  # the answer may be unfinished
                if sample.metric in REASONED:
                    facts |= {"answered": extract_answer(answer) is not None}
                key = row_key(item, sample, context.config)
                yield self._row(item, sample, prompt, context, facts), {**key, **timed}

    def _decode(
        self, contexts: Seq[PrefilledContext], prompt: Prompt, sample: Sample
    ) -> list[tuple[PrefilledContext, list[int], dict[str, Any]]]:
        """-> for each config, in order: its context, the ids it decoded, and timings"""
        requests = [self._request(context, prompt, sample) for context in contexts]
        for together in [requests] if self.share else [[request] for request in requests]:
            self.scheduler.run(together)
        found = []
        for context, request in zip(contexts, requests, strict=True):
            if request.error:
                raise request.error
            decoding = request.done_s - request.first_token_s
            timed = {
                "prefill_s": context.prefill_s,
                "prefill_configs": context.prefill_configs,
                "first_token_s": context.prefill_s + request.first_token_s,
                "answer_s": request.done_s,
                "decode_configs": len(contexts) if self.share else 1,
                "tokens_per_s": request.steps / decoding if request.steps else None,  # of each config
            }
            after = context if context.is_frozen else replace(context, report=request.sequence.cache.report())
            found.append((after, request.answer.ids, timed))
        return found

    def _request(self, context: PrefilledContext, prompt: Prompt, sample: Sample) -> Request:
        """Greedy, until an end token, a stop text or max_new_tokens."""
        sequence = context.fork(_asked(sample) if len(prompt.question) else "")
        generation = Generation(sample.max_new_tokens, stop=sample.stops)
        return Request(
            sequence.config, torch.cat([prompt.context, prompt.question]), generation, sequence, logits=context.logits,
            keeps_cache=not context.is_frozen, banned_first=self._ends(sample) if sample.non_empty else (),
        )  # fmt: skip

    def _ends(self, sample: Sample) -> tuple[int, ...]:
        """The tokens that would end an answer before it begins."""
        stops = (ids_of(self.tokenizer, stop)[-1] for stop in sample.stops)
        return *eos_token_ids(self.model, self.tokenizer), *stops

    def _rank_choices(self, item: Item) -> Iterator[TimedRow]:
        """The log-likelihood of every choice, given the compressed cache."""
        for sample in item.samples:
            began = now(self.model.device)
            prefilled: dict[tuple, list[PrefilledContext]] = {}
            likelihoods: list[list[float]] = [[] for _ in self.configs]
            for prompt, ids in choice_prompts(self.tokenizer, sample, item.protocol, self.context_length):
                text = tuple(prompt.context.tolist())
                if text not in prefilled:
                    prefilled[text] = self._prefill(prompt, sample, self.configs)
                contexts = prefilled[text]
                asked = _asked(sample) if len(prompt.question) else ""
                forks = [context.fork(asked) for context in contexts]
                after = torch.stack([context.logits for context in contexts])
                found = loglikelihoods(forks, after, prompt.question, ids)
                for mine, likelihood in zip(likelihoods, found, strict=True):
                    mine.append(likelihood)
                contexts = [
                    context if context.is_frozen else replace(context, report=fork.cache.report())
                    for context, fork in zip(contexts, forks, strict=True)
                ]
            seconds = now(self.model.device) - began
            for context, mine in zip(contexts, likelihoods, strict=True):
                score = METRICS[sample.metric](mine, **sample.extra)
                facts = {"score": score, "answer": sample.choices[mine.index(max(mine))], "loglikelihoods": mine}
                facts |= {"score_per_character": METRICS["lm_eval_acc_norm"](mine, **sample.extra)}
                timed = {"seconds": seconds, "prefill_configs": context.prefill_configs}
                key = row_key(item, sample, context.config)
                yield self._row(item, sample, prompt, context, facts), {**key, **timed}

    def _row(
        self, item: Item, sample: Sample, prompt: Prompt, context: PrefilledContext, facts: dict[str, Any]
    ) -> dict[str, Any]:
        """A score with all that decides it, so that rows can be compared."""
        return {
            **row_key(item, sample, context.config),
            **facts,
            "metric": sample.metric,
            **{name: getattr(context.report, name) for name in REPORTED},
            "compressed": _compressed(sample, prompt, context),
            "budget_unit": budget_unit(context.config, context.method, context.sequence.cache.budget),
            "prompt_tokens": prompt.tokens,
            "template": prompt.template,
            "bos": prompt.bos,
            "truncation": prompt.rule,
            "truncated": prompt.cut,
            **setting(self.model, self.tokenizer, sample, context.method),
        }


def _asked(sample: Sample) -> str:
    """The question, for query-aware methods; "" where there is no context beside it."""
    return sample.question.strip() if sample.context else ""


def _compressed(sample: Sample, prompt: Prompt, context: PrefilledContext) -> str:
    method = context.method
    if not (method.scorer or method.retrieval):
        return "nothing"
    if sample.long or not (method.retrieval or context.is_frozen):
        return "decoding"
    return "context" if len(prompt.question) else "whole prompt"


def _until_stop(text: str, stops: Seq[str]) -> str:
    """Cut the text at the first stop; a stop before any other text does not count."""
    for stop in stops:
        text = text.lstrip().split(stop)[0] if stop in text.lstrip() else text
    return text


def choice_prompts(tokenizer: Any, sample: Sample, protocol: str, context_length: int) -> list[tuple[Prompt, Tensor]]:
    """For every choice, the prompt and the ids to score: those of prompt and choice tokenized together, less the
    prompt's. What is too long loses its beginning; the last token is scored but never an input (as in lm-eval)."""
    found = []
    for prompt, choice in pairs(sample):
        context, whole = (torch.tensor(tokenizer(text).input_ids) for text in (prompt, prompt + choice))
        ids, cut = whole[len(context) :], max(0, len(whole) - context_length - 1)
        if cut and cut >= len(context):
            raise BadInput(
                f"{sample.task} '{sample.id}': a choice has {len(ids)} tokens, the model's context length is "
                f"{context_length}."
            )
        bos = int(bool(len(context)) and int(context[0]) == tokenizer.bos_token_id)
        first = len(tokenizer(sample.context.rstrip()).input_ids) if sample.context else bos
        split = first if protocol == "agnostic" and first > max(bos, cut) else len(context)
        parts = context[cut:split], context[split:]
        found.append((Prompt(*parts, "plain", 0 if cut else bos, cut, "beginning of the prompt"), ids))
    return found


def loglikelihoods(contexts: Seq[Sequence], after: Tensor, question: Tensor, ids: Tensor) -> list[float]:
    """Score these tokens after the question, for every context; after: logits after the context [contexts, vocabulary]

    Retrieval methods get the tokens one by one, as in decode: of a chunk they may attend to every token.
    """
    chunk, steps = [torch.cat([question, ids[:-1]])], [question, *ids[:-1].split(1)]
    found = []
    for sequence, first in zip(contexts, after, strict=True):
        follow = chunk if sequence.cache.tracker.frozen else steps
        logits = [first[None], *(sequence.forward(some, keep=0) for some in follow if len(some))]
        scores = torch.cat(logits)[-len(ids) :].float().log_softmax(-1)
        found.append(float(scores.gather(1, ids.to(scores.device)[:, None]).sum()))
    return found
