"""Prompts of any length, read piece by piece; answers, written token by token: `kvkeep.Engine`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from kvkeep.cache.trim import trim
from kvkeep.compress.method import Method, parse
from kvkeep.engine.listen import listen
from kvkeep.engine.many import together
from kvkeep.engine.sample import Sampler
from kvkeep.engine.session import Cache
from kvkeep.engine.words import Sentences, Unfolding
from kvkeep.errors import BadInput, BadParameter
from kvkeep.model.adapter import runs_on, trained_window
from kvkeep.model.prompt import encode, ends
from kvkeep.model.slices import TOKENS, sliced

PIECE = 1024  # tokens read at a time: what a forward pass of a long prompt costs in memory
GPU_PIECE = 4096  # where windows fetch: a GPU is done with less before it is told what comes next


@dataclass(frozen=True)
class Progress:
    """How far a prompt is read."""

    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def left(self) -> float:
        """Seconds, if it goes on like this."""
        return (self.total - self.done) / self.rate if self.rate else 0.0


@dataclass(frozen=True)
class Answer:
    """What was written last."""

    words: Unfolding
    prompt_tokens: int

    @property
    def text(self) -> str:
        return self.words.text

    @property
    def ids(self) -> list[int]:
        return self.words.ids


class Engine:
    """Answers from compressed caches: `generate` and `stream` for a prompt, `chat` for a conversation."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: str | Method = "kvkeep",
        budget: int | float | None = 2048,
        *,
        piece: int | None = None,
        schedule: str | int | None = None,
        host_limit: int | None = None,
        disk: str | Path | None = None,
        storage: str | None = None,
        **parameters: Any,
    ):
        """piece: tokens of a prompt read at a time; None: all at once where the window and the method allow it.

        The rest as in `kvkeep.Cache`.
        """
        if piece is not None and piece < 1:
            raise BadParameter(f"piece={piece}: a prompt is read at least one token at a time.")
        self.model, self.tokenizer, self.piece = model, tokenizer, piece
        self.options = {"schedule": schedule, "host_limit": host_limit, "disk": disk, "storage": storage}
        self.method, self.budget = parse(method, **parameters), budget
        self.cache = self._fresh()  # of the answer that `stream` or `chat` wrote last
        self.fed: list[int] = []  # what it has read
        self.answer = Answer(Unfolding(tokenizer), 0)
        self.sentences = Sentences(tokenizer)
        self.expected: Tensor | None = None  # logits after the token read last, where surprise is asked for

    def _fresh(self) -> Cache:
        return Cache(self.model, self.method, self.budget, **self.options)

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str], **options: Any) -> str | list[str]:
        """The whole answer at once, options as in `stream`; or the answers to several prompts, `rows` at a time.

        Several prompts come without progress.
        """
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, **options))
        return together(self, prompt, **options)

    def read_alone(self, ids: Tensor) -> tuple[Cache, Tensor]:
        """A cache of its own that has read a prompt, and the logits after it."""
        twin = self.apart()
        twin.check_length(len(ids), 1)
        return twin.cache, twin.read(ids)

    def apart(self) -> Engine:
        """Another engine that has read nothing yet."""
        twin = copy.copy(self)
        twin.cache, twin.fed = self._fresh(), []
        return twin

    def stream(
        self,
        prompt: str,
        *,
        question: str | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[str]:
        """The answer piece by piece.

        question: what the prompt is read for; it is asked after the prompt, and query-aware methods know it before.
        """
        ids, sampler = self.encode(prompt, question), Sampler(temperature, top_p, seed)
        self.cache, self.fed = self._fresh(), []  # nobody goes on with it before it is done
        own = copy.copy(self)  # the engine may be used for something else between two pieces
        own.fed = []
        try:
            if question is not None:
                own.read_for(question, len(ids))
            for piece in own._answer(ids, max_new_tokens, sampler, progress):
                self.answer = own.answer
                yield piece
        finally:
            if self.cache is own.cache:
                self.fed, self.answer, self.expected = own.fed, own.answer, own.expected

    def encode(self, prompt: str, question: str | None = None) -> Tensor:
        """A prompt as the model reads it. -> [n]"""
        text = f"{prompt}\n\n{question}" if question and question.strip() else prompt
        if not text.strip():
            raise BadInput("the prompt is empty; give the model something to read.")
        return encode(self.tokenizer, text)[0]

    def length(self, prompt: str, question: str | None = None) -> int:
        """Tokens of a prompt as the model reads it."""
        return len(self.encode(prompt, question))

    def chat(
        self,
        messages: list[dict[str, str]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> str:
        """The answer to a conversation. What continues the last one goes on with its cache."""
        if not messages or messages[-1].get("role") == "assistant":
            raise BadInput("a chat ends with a message to answer; give at least one, the last not the assistant's.")
        ids = encode(self.tokenizer, messages)[0]
        sampler = Sampler(temperature, top_p, seed)
        if not self._continues(ids):
            self.cache, self.fed = self._fresh(), []
        return "".join(self._answer(ids, max_new_tokens, sampler, progress)).strip()

    def _continues(self, ids: Tensor) -> bool:
        """Whether these begin with what the cache has read, no pass of which was cut short."""
        whole = self.cache.underway is None and self.cache.seen == len(self.fed)
        return whole and 0 < len(self.fed) < len(ids) and ids[: len(self.fed)].tolist() == self.fed

    def read_for(self, question: str, tokens: int) -> None:
        """Let a method that can use it know the question before it reads a text of so many tokens."""
        recaller = self.cache.recaller
        if question.strip() and recaller and getattr(self.method.recall.index, "asks", False):
            ids = self.tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
            edge = self.method.recall.sizes(self.cache.method.tokens(self.cache.budget, tokens)).near
            recaller.question = listen(self.model, ids.to(runs_on(self.model)), self.cache.rotations, edge)

    def _answer(
        self, ids: Tensor, max_new_tokens: int, sampler: Sampler, progress: Callable[[Progress], None] | None
    ) -> Iterator[str]:
        if max_new_tokens < 1:
            raise BadParameter(f"max_new_tokens={max_new_tokens}: an answer has at least one.")
        self.check_length(len(ids), max_new_tokens)
        logits = self.read(ids, progress)
        text, last = Unfolding(self.tokenizer), ends(self.model, self.tokenizer)
        self.answer = Answer(text, len(ids))
        for number in range(max_new_tokens):
            token = sampler(logits)
            if token in last:
                break
            if piece := text.add(token):
                yield piece
            if number + 1 < max_new_tokens:
                logits = self._pass(torch.tensor([token]))[-1]
        if rest := text.end():
            yield rest

    def check_length(self, prompt: int, max_new_tokens: int) -> None:
        """Refuse what goes beyond the model's window, unless the method reads on in constant memory."""
        window, over = trained_window(self.model), prompt + max_new_tokens - trained_window(self.model)
        if over > 0 and not self.method.endless:
            raise BadInput(
                f"the prompt has {prompt} tokens and the answer may take {max_new_tokens}, but the model's window is "
                f"{window} and '{self.method.name}' leaves keys where they stood: shorten the prompt by {over} tokens, "
                f"or use a method that reads any length (actqkv, infllm, tokenselect, intelllm, streamingllm)."
            )

    def read(self, ids: Tensor, progress: Callable[[Progress], None] | None = None) -> Tensor:
        """Feed what is not fed yet, piece by piece. ids [n] -> logits after the last token [vocabulary]"""
        began, start = time.perf_counter(), len(self.fed)
        size = self._piece(len(ids))
        logits = None
        for first in range(start, len(ids), size):
            logits = self._pass(ids[first : first + size])[-1].clone()
            if self.method.recall:
                trim()
            if progress:
                progress(Progress(min(first + size, len(ids)) - start, len(ids) - start, time.perf_counter() - began))
        assert logits is not None
        return logits

    def _piece(self, tokens: int) -> int:
        recall = self.method.recall
        if recall and recall.needs == "surprise":  # known only after a pass, needed before the near window is left
            return min(self.piece or PIECE, recall.sizes(self.method.tokens(self.cache.budget, tokens)).near)
        if self.piece:
            return self.piece
        if recall and recall.window:
            piece = GPU_PIECE if self.model.device.type == "cuda" else PIECE
            return max(1, piece // recall.window) * recall.window
        return tokens if tokens <= trained_window(self.model) else PIECE

    def feed(self, ids: Tensor, keep: int = 1) -> Tensor:
        """Read on. ids [q] -> logits of the last `keep` tokens, 0: of all [keep, vocabulary]"""
        size = self._piece(len(ids))
        return torch.cat([self._pass(ids[first : first + size], keep) for first in range(0, len(ids), size)])[-keep:]

    def _pass(self, ids: Tensor, keep: int = 1) -> Tensor:
        """One forward pass."""
        self.announce(ids)
        with torch.inference_mode(), sliced(self.model) if len(ids) > TOKENS else nullcontext():
            batch = ids[None].to(runs_on(self.model))
            shown = 0 if self._needs == "surprise" else keep
            logits = self.model(batch, past_key_values=self.cache, logits_to_keep=shown).logits[0]
        self.took(ids, logits)
        return logits[-keep:]

    @property
    def _needs(self) -> str:
        return self.method.recall.needs if self.method.recall else ""

    def announce(self, ids: Tensor) -> None:
        """Tell the cache what it cannot see of tokens that come. ids [q]"""
        if self._needs == "sentences":
            self.cache.recaller.tell(0, self.sentences.ends(ids), self.cache.seen)

    def took(self, ids: Tensor, logits: Tensor) -> None:
        """Tokens went through the model: note what comes of them. ids [q], logits after each, or after the last"""
        if self._needs == "surprise":
            self.cache.recaller.tell(0, self._surprise(logits, ids))
        self.fed += ids.tolist()

    def fork(self) -> Engine:
        """Another engine that has read the same: one text, many questions."""
        twin = copy.copy(self)
        twin.cache, twin.fed = self.cache.fork(), list(self.fed)
        return twin

    def _surprise(self, logits: Tensor, ids: Tensor) -> Tensor:
        """-ln of what each token was expected with; the first of all counts as no surprise. [n]"""
        before = self.expected if self.fed else None
        self.expected = logits[-1:].float()
        rows = logits[:-1].float() if before is None else torch.cat([before, logits[:-1].float()])
        told = (
            -rows.log_softmax(-1).gather(1, ids[-len(rows) :, None].to(rows.device))[:, 0] if len(rows) else rows[:, 0]
        )
        return torch.cat([told.new_zeros(len(ids) - len(told)), told]).cpu()
