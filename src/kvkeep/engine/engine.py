"""Prompts of any length, read piece by piece; answers, written token by token: `kvkeep.Engine`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.engine.batch_generate import together
from kvkeep.engine.context import Context
from kvkeep.engine.detokenizer import Answer, Sentences, Unfolding
from kvkeep.engine.progress import Progress
from kvkeep.engine.question_queries import listen
from kvkeep.engine.sampling import Generation, check_count
from kvkeep.errors import BadInput, CacheMisuse
from kvkeep.model.chat import as_asked, check_messages, encode, ends
from kvkeep.model.chunked_mlp import TOKENS, sliced
from kvkeep.model.hf_cache import runs_on, trained_window
from kvkeep.storage.offload.malloc_trim import trim

PIECE = 1024  # tokens read at a time: what a forward pass of a long prompt costs in memory
GPU_PIECE = 4096  # where windows fetch: a GPU is done with less before it is told what comes next


def check_length(method: Method, window: int, prompt: int, max_new_tokens: int) -> None:
    """Refuse a prompt of so many tokens that goes beyond a model's window, unless the method reads on."""
    over = prompt + max_new_tokens - window
    if over > 0 and not method.endless:
        raise BadInput(
            f"the prompt has {prompt} tokens and the answer may take {max_new_tokens}, but the model's window is "
            f"{window} and '{method.name}' leaves keys where they stood: shorten the prompt by {over} tokens, "
            f"or use a method that reads any length (actqkv, infllm, tokenselect, intelllm, streamingllm)."
        )


class Engine:
    """Answers from compressed caches.

    `generate` and `stream` for a prompt, `read` for a text with many questions, `chat` for a conversation.
    """

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
        if piece is not None:
            check_count("piece", piece, 1, "a prompt is read at least one token at a time; give a whole number")
        self.model, self.tokenizer, self.piece = model, tokenizer, piece
        self.options = {"schedule": schedule, "host_limit": host_limit, "disk": disk, "storage": storage}
        self.method, self.budget = parse(method, **parameters), budget
        self.cache = self._fresh()  # of the answer that `stream` or `chat` wrote last
        self.fed: list[int] = []  # what it has read
        self.answer = Answer(Unfolding(tokenizer), 0)
        self.sentences = Sentences(tokenizer)
        self.waiting = False  # tokens were prefilled that nobody has asked about yet
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

    def read(
        self, text: str, *, question: str | None = None, progress: Callable[[Progress], None] | None = None
    ) -> Context:
        """Read a text once, to ask any number of questions about it.

        question: one that is known before: query-aware methods keep what it needs, and others may be asked, too
        """
        return Context.read(self.apart(), text, question, progress)

    def load_context(self, path: str | Path) -> Context:
        """A `Context` that was saved, with the method and budget it was read with."""
        return Context.load(self.apart(), path)

    def prefill_sequence(self, ids: Tensor) -> tuple[Cache, Tensor]:
        """A cache of its own that has read a prompt, and the logits after it."""
        twin = self.apart()
        twin.check_length(len(ids), 1)
        return twin.cache, twin.prefill(ids)

    def apart(self) -> Engine:
        """Another engine that has read nothing yet."""
        twin = copy.copy(self)
        twin.cache, twin.fed, twin.waiting = self._fresh(), [], False
        return twin

    def _fork(self) -> Engine:
        """Another engine that has read the same, and goes on by itself."""
        twin = copy.copy(self)
        twin.cache, twin.fed = self.cache.fork(), list(self.fed)
        return twin

    def stream(
        self,
        prompt: str,
        *,
        question: str | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The answer piece by piece.

        question: what the prompt is read for; it is asked after the prompt, and query-aware methods know it before.
        options: max_new_tokens=256, temperature=0.0 (the likeliest token), top_p=1.0, top_k=0 (all tokens), seed=0
        """
        self._check_unread()
        return self._stream(self.encode(prompt, question), question, Generation.of(options), progress)

    def _stream(
        self, ids: Tensor, question: str | None, how: Generation, progress: Callable[[Progress], None] | None
    ) -> Iterator[str]:
        self.cache, self.fed = self._fresh(), []  # nobody goes on with it before it is done
        own = copy.copy(self)  # the engine may be used for something else between two pieces
        own.fed = []
        try:
            if question is not None:
                own.read_for(question, len(ids))
            for piece in own.answer_to(ids, how, progress):
                self.answer = own.answer
                yield piece
        finally:
            if self.cache is own.cache:
                self.fed, self.answer, self.expected = own.fed, own.answer, own.expected

    def _check_unread(self) -> None:
        """Refuse to begin again where that would drop what was prefilled by hand."""
        if self.waiting:
            raise CacheMisuse(
                f"this engine has prefilled {len(self.fed)} tokens, and a new prompt would drop them; "
                "use engine.read(text).ask(question), or another engine."
            )

    def encode(self, prompt: str, question: str | None = None) -> Tensor:
        """A prompt as the model reads it. -> [n]"""
        return encode(self.tokenizer, as_asked(prompt, question))[0]

    def length(self, prompt: str, question: str | None = None) -> int:
        """Tokens of a prompt as the model reads it."""
        return len(self.encode(prompt, question))

    def chat(
        self,
        messages: list[dict[str, str]],
        *,
        progress: Callable[[Progress], None] | None = None,
        **options: Any,
    ) -> str:
        """The answer to a conversation, options as in `stream`. What continues the last one goes on with its cache."""
        how = Generation.of(options)
        check_messages(messages)
        ids = encode(self.tokenizer, messages)[0]
        if not self._continues(ids):
            self._check_unread()
            self.cache, self.fed = self._fresh(), []
        return "".join(self.answer_to(ids, how, progress)).strip()

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

    def answer_to(
        self, ids: Tensor, how: Generation, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[str]:
        """Read what is not read yet of a prompt, and write what follows. ids [n]"""
        self.check_length(len(ids), how.max_new_tokens)
        sampler = how.sampler
        logits = self.prefill(ids, progress)
        self.waiting = False
        text, last = Unfolding(self.tokenizer), ends(self.model, self.tokenizer)
        self.answer = Answer(text, len(ids))
        for number in range(how.max_new_tokens):
            token = sampler(logits)
            if token in last:
                break
            if piece := text.add(token):
                yield piece
            if number + 1 < how.max_new_tokens:
                logits = self._pass(torch.tensor([token]))[-1]
        if rest := text.end():
            yield rest

    def check_length(self, prompt: int, max_new_tokens: int) -> None:
        """Refuse what goes beyond the model's window, unless the method reads on in constant memory."""
        check_length(self.method, trained_window(self.model), prompt, max_new_tokens)

    def prefill(self, ids: Tensor, progress: Callable[[Progress], None] | None = None) -> Tensor:
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
        self.cache.arrivals.mark_prompt()
        self.waiting = True
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
        self.waiting = True
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

    def _surprise(self, logits: Tensor, ids: Tensor) -> Tensor:
        """-ln of what each token was expected with; the first of all counts as no surprise. [n]"""
        before = self.expected if self.fed else None
        self.expected = logits[-1:].float()
        rows = logits[:-1].float() if before is None else torch.cat([before, logits[:-1].float()])
        told = (
            -rows.log_softmax(-1).gather(1, ids[-len(rows) :, None].to(rows.device))[:, 0] if len(rows) else rows[:, 0]
        )
        return torch.cat([told.new_zeros(len(ids) - len(told)), told]).cpu()
