"""`kvkeep.Engine`: prompts prefilled in chunks, answers decoded token by token."""

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
from kvkeep.engine.batch_generate import generate_batch
from kvkeep.engine.context import Context
from kvkeep.engine.detokenizer import Answer, IncrementalDetokenizer, SentenceBoundaries
from kvkeep.engine.progress import Progress
from kvkeep.engine.question_queries import capture_question_queries
from kvkeep.engine.sampling import Generation, check_count
from kvkeep.errors import BadInput, CacheMisuse
from kvkeep.model.chat import check_messages, encode, eos_token_ids, with_question
from kvkeep.model.chunked_mlp import CHUNK_TOKENS, chunked_mlp
from kvkeep.model.hf_cache import context_length, execution_device
from kvkeep.storage.offload.malloc_trim import trim

PREFILL_CHUNK_SIZE = 1024  # tokens of a forward pass of a long prompt: what it costs in memory
GPU_PREFILL_CHUNK_SIZE = 4096  # of retrieval methods: with fewer, a GPU waits for kernel launches


def check_length(method: Method, context_length: int, prompt: int, max_new_tokens: int) -> None:
    """Refuse a prompt of so many tokens that exceeds the model's context length, unless the method extends it."""
    over = prompt + max_new_tokens - context_length
    if over > 0 and not method.extends_context:
        raise BadInput(
            f"the prompt has {prompt} tokens and the answer may take {max_new_tokens}, but the model's context "
            f"length is {context_length} and '{method.name}' keeps token positions: shorten the prompt by {over} "
            f"tokens, or use a method for any length (actqkv, infllm, tokenselect, intelllm, streamingllm)."
        )


class Engine:
    """Generates from compressed caches.

    `generate` and `stream` for a prompt, `read` for a context with many questions, `chat` for a conversation.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: str | Method = "kvkeep",
        budget: int | float | None = 2048,
        *,
        prefill_chunk_size: int | None = None,
        schedule: str | int | None = None,
        host_limit: int | None = None,
        disk: str | Path | None = None,
        storage: str | None = None,
        **parameters: Any,
    ):
        """prefill_chunk_size: tokens of a prompt per forward pass; None: all where context length and method allow.

        The rest as in `kvkeep.Cache`.
        """
        if prefill_chunk_size is not None:
            check_count("prefill_chunk_size", prefill_chunk_size, 1, "use a whole number of tokens, at least one")
        self.model, self.tokenizer, self.prefill_chunk_size = model, tokenizer, prefill_chunk_size
        self.options = {"schedule": schedule, "host_limit": host_limit, "disk": disk, "storage": storage}
        self.method, self.budget = parse(method, **parameters), budget
        self.cache = self._new_cache()  # of the last answer of `stream` or `chat`
        self.token_ids: list[int] = []  # the tokens it has seen
        self.answer = Answer(IncrementalDetokenizer(tokenizer), 0)
        self.sentences = SentenceBoundaries(tokenizer)
        self.has_prefill = False  # `prefill` or `extend` were called, and no answer was generated since
        self.last_logits: Tensor | None = None  # after the last token, where the method needs surprise

    def _new_cache(self) -> Cache:
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
        return generate_batch(self, prompt, **options)

    def read(
        self, text: str, *, question: str | None = None, progress: Callable[[Progress], None] | None = None
    ) -> Context:
        """Prefill a text once, to ask any number of questions about it.

        question: one that is known before: query-aware methods keep what it needs; others may be asked, too
        """
        return Context.read(self.new_sequence(), text, question, progress)

    def load_context(self, path: str | Path) -> Context:
        """A saved `Context`, with its own method and budget."""
        return Context.load(self.new_sequence(), path)

    def prefill_sequence(self, ids: Tensor) -> tuple[Cache, Tensor]:
        """A new cache with a prompt prefilled, and the logits after it."""
        sequence = self.new_sequence()
        sequence.check_length(len(ids), 1)
        return sequence.cache, sequence.prefill(ids)

    def new_sequence(self) -> Engine:
        """An engine of the same configuration with an empty cache."""
        sequence = copy.copy(self)
        sequence.cache, sequence.token_ids, sequence.has_prefill = self._new_cache(), [], False
        return sequence

    def _fork(self) -> Engine:
        """An engine of the same configuration with a copy of the cache."""
        sequence = copy.copy(self)
        sequence.cache, sequence.token_ids = self.cache.fork(), list(self.token_ids)
        return sequence

    def stream(
        self,
        prompt: str,
        *,
        question: str | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The answer, detokenized incrementally.

        question: asked after the prompt; methods that can use it before the prompt do.
        options: max_new_tokens=256, temperature=0.0 (the likeliest token), top_p=1.0, top_k=0 (all tokens), seed=0
        """
        self._check_no_prefill()
        return self._stream(self.encode(prompt, question), question, Generation.of(options), progress)

    def _stream(
        self, ids: Tensor, question: str | None, how: Generation, progress: Callable[[Progress], None] | None
    ) -> Iterator[str]:
        self.cache, self.token_ids = self._new_cache(), []  # `chat` must not continue it before it is complete
        own = copy.copy(self)  # the engine may be used for something else between two yields
        own.token_ids = []
        try:
            if question is not None:
                own.set_question(question, len(ids))
            for text in own.stream_ids(ids, how, progress):
                self.answer = own.answer
                yield text
        finally:
            if self.cache is own.cache:
                self.token_ids, self.answer, self.last_logits = own.token_ids, own.answer, own.last_logits

    def _check_no_prefill(self) -> None:
        """Refuse a new prompt where that would drop tokens prefilled by `prefill` or `extend`."""
        if self.has_prefill:
            raise CacheMisuse(
                f"this engine has prefilled {len(self.token_ids)} tokens, and a new prompt would drop them; "
                "use engine.read(text).ask(question), or another engine."
            )

    def encode(self, prompt: str, question: str | None = None) -> Tensor:
        """Input ids of a prompt, through the chat template. -> [n]"""
        return encode(self.tokenizer, with_question(prompt, question))[0]

    def length(self, prompt: str, question: str | None = None) -> int:
        """Tokens of a prompt, through the chat template."""
        return len(self.encode(prompt, question))

    def chat(
        self,
        messages: list[dict[str, str]],
        *,
        progress: Callable[[Progress], None] | None = None,
        **options: Any,
    ) -> str:
        """The answer to a conversation, options as in `stream`. One that continues the last reuses its cache."""
        how = Generation.of(options)
        check_messages(messages)
        ids = encode(self.tokenizer, messages)[0]
        if not self._continues(ids):
            self._check_no_prefill()
            self.cache, self.token_ids = self._new_cache(), []
        return "".join(self.stream_ids(ids, how, progress)).strip()

    def _continues(self, ids: Tensor) -> bool:
        """Whether these ids begin with those of the cache, no forward pass of which was cut short."""
        complete = not self.cache.in_forward and self.cache.seen == len(self.token_ids)
        return complete and 0 < len(self.token_ids) < len(ids) and ids[: len(self.token_ids)].tolist() == self.token_ids

    def set_question(self, question: str, tokens: int) -> None:
        """Capture the question's queries, for a method that retrieves with them, before a prefill of so many tokens."""
        retrieval = self.method.retrieval
        if question.strip() and retrieval and getattr(retrieval.index, "uses_question", False):
            ids = self.tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
            ids = ids.to(execution_device(self.model))
            edge = retrieval.sizes(self.cache.method.tokens(self.cache.budget, tokens)).near
            self.cache.backend.question = capture_question_queries(self.model, ids, self.cache.rotations, edge)

    def stream_ids(
        self, ids: Tensor, how: Generation, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[str]:
        """Prefill the ids the cache has not seen, and decode an answer. ids [n]"""
        self.check_length(len(ids), how.max_new_tokens)
        sampler = how.sampler
        logits = self.prefill(ids, progress)
        self.has_prefill = False
        detokenizer, eos = IncrementalDetokenizer(self.tokenizer), eos_token_ids(self.model, self.tokenizer)
        self.answer = Answer(detokenizer, len(ids))
        for number in range(how.max_new_tokens):
            token = sampler(logits)
            if token in eos:
                break
            if text := detokenizer.add(token):
                yield text
            if number + 1 < how.max_new_tokens:
                logits = self.forward(torch.tensor([token]))[-1]
        if rest := detokenizer.finish():
            yield rest

    def check_length(self, prompt: int, max_new_tokens: int) -> None:
        """Refuse what exceeds the model's context length, unless the method extends it."""
        check_length(self.method, context_length(self.model), prompt, max_new_tokens)

    def prefill(self, ids: Tensor, progress: Callable[[Progress], None] | None = None) -> Tensor:
        """Prefill the ids the cache has not seen, in chunks. ids [n] -> logits after the last token [vocabulary]"""
        began, start = time.perf_counter(), len(self.token_ids)
        size = self._chunk_size(len(ids))
        logits = None
        for first in range(start, len(ids), size):
            logits = self.forward(ids[first : first + size])[-1].clone()
            if self.method.retrieval:
                trim()
            if progress:
                progress(Progress(min(first + size, len(ids)) - start, len(ids) - start, time.perf_counter() - began))
        assert logits is not None
        self.cache.tracker.mark_prompt()
        self.has_prefill = True
        return logits

    def _chunk_size(self, tokens: int) -> int:
        retrieval = self.method.retrieval
        if retrieval and retrieval.needs == "surprise":  # known only after a pass, needed before tokens are offloaded
            near = retrieval.sizes(self.method.tokens(self.cache.budget, tokens)).near
            return min(self.prefill_chunk_size or PREFILL_CHUNK_SIZE, near)
        if self.prefill_chunk_size:
            return self.prefill_chunk_size
        if retrieval and retrieval.window:
            size = GPU_PREFILL_CHUNK_SIZE if self.model.device.type == "cuda" else PREFILL_CHUNK_SIZE
            return max(1, size // retrieval.window) * retrieval.window
        return tokens if tokens <= context_length(self.model) else PREFILL_CHUNK_SIZE

    def extend(self, ids: Tensor, keep: int = 1) -> Tensor:
        """Append tokens. ids [q] -> logits of the last `keep` of them, 0: of all [keep, vocabulary]"""
        self.has_prefill = True
        size = self._chunk_size(len(ids))
        return torch.cat([self.forward(ids[first : first + size], keep) for first in range(0, len(ids), size)])[-keep:]

    def forward(self, ids: Tensor, keep: int = 1) -> Tensor:
        """One forward pass."""
        self.before_forward(ids)
        with torch.inference_mode(), chunked_mlp(self.model) if len(ids) > CHUNK_TOKENS else nullcontext():
            batch = ids[None].to(execution_device(self.model))
            shown = 0 if self._needs == "surprise" else keep
            logits = self.model(batch, past_key_values=self.cache, logits_to_keep=shown).logits[0]
        self.after_forward(ids, logits)
        return logits[-keep:]

    @property
    def _needs(self) -> str:
        return self.method.retrieval.needs if self.method.retrieval else ""

    def before_forward(self, ids: Tensor) -> None:
        """Give the cache the text's marks of the next tokens. ids [q]"""
        if self._needs == "sentences":
            self.cache.backend.set_token_marks(0, self.sentences.mark_ends(ids), self.cache.seen)

    def after_forward(self, ids: Tensor, logits: Tensor) -> None:
        """Record tokens that the model has processed. ids [q], logits after each, or after the last"""
        if self._needs == "surprise":
            self.cache.backend.set_token_marks(0, self._surprise(logits, ids))
        self.token_ids += ids.tolist()

    def _surprise(self, logits: Tensor, ids: Tensor) -> Tensor:
        """-ln of each token's probability; the very first token counts as no surprise. [n]"""
        before = self.last_logits if self.token_ids else None
        self.last_logits = logits[-1:].float()
        rows = logits[:-1].float() if before is None else torch.cat([before, logits[:-1].float()])
        surprise = rows[:, 0]
        if len(rows):
            surprise = -rows.log_softmax(-1).gather(1, ids[-len(rows) :, None].to(rows.device))[:, 0]
        return torch.cat([surprise.new_zeros(len(ids) - len(surprise)), surprise]).cpu()
