"""One sequence: a cache, the tokens it has seen, and the forward passes that extend it."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.cache.evictor import SPARE
from kvkeep.cache.retrieval import RetrievalBackend
from kvkeep.compress.method import Method, Schedule
from kvkeep.engine.detokenizer import SentenceBoundaries
from kvkeep.engine.memory import MEMORY_FRACTION, free_device_bytes, row_bytes, trim
from kvkeep.engine.progress import Progress, ProgressCallback
from kvkeep.errors import BadInput
from kvkeep.kernels.torch.retrieval_units import concat_heads
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.chat import context_ids, encode, question_ids
from kvkeep.model.chunked_mlp import long_prompt
from kvkeep.model.fused import fused_ops
from kvkeep.model.head_shards import agree_on_least
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, context_length, execution_device, key_shape
from kvkeep.model.user_text import UserText
from kvkeep.storage.history import History
from kvkeep.storage.offload.host import HostMemoryBudget
from kvkeep.storage.upload import upload
from kvkeep.types import Budget

PREFILL_CHUNK_SIZE = 1024  # tokens of a forward pass of a long prompt: what it costs in memory
GPU_PREFILL_CHUNK_SIZE = 4096  # of retrieval methods: with fewer, a GPU waits for kernel launches


def check_length(method: Method, context_length: int, prompt: int, max_new_tokens: int) -> None:
    """Refuse a prompt of so many tokens that exceeds the model's context length, unless the method extends it."""
    over, room = prompt + max_new_tokens - context_length, context_length - prompt
    if over > 0 and not method.extends_context:
        shorter = f"shorten the prompt by {over} tokens" if over < prompt else "shorten the prompt"
        fewer = f", use max_new_tokens={room} or fewer" if room > 0 else ""
        raise BadInput(
            f"the prompt has {prompt} tokens and the answer may take {max_new_tokens}, but the model's context "
            f"length is {context_length} and '{method.name}' keeps token positions: {shorter}{fewer}, "
            f"or use a method for any length (actqkv, infllm, tokenselect, intelllm, streamingllm)."
        )


@dataclass(frozen=True)
class SequenceConfig:
    """What the sequences of an engine have in common."""

    model: Any
    tokenizer: Any
    method: Method
    budget: int | float | None
    prefill_chunk_size: int | None = None
    cache_options: Mapping[str, Any] = field(default_factory=dict)
    host_budget: HostMemoryBudget | None = None  # shared by all sequences; None: each has its own
    allow_special_tokens: bool = False  # what looks like a control token in a user's text is one

    def is_like(self, other: SequenceConfig) -> bool:
        """Whether another one has the same method and budget, by name: in every process that shares the model alike."""
        return (self.method.name, self.budget) == (other.method.name, other.budget)

    @cached_property
    def device(self) -> torch.device:
        return execution_device(self.model)

    @cached_property
    def appending(self) -> SequenceConfig:
        """The same, but nothing is evicted while an answer is decoded."""
        schedule = Schedule()
        if self.method.schedule == schedule:
            return self
        return replace(self, method=replace(self.method, schedule=schedule))

    @cached_property
    def sentences(self) -> SentenceBoundaries:
        return SentenceBoundaries(self.tokenizer)

    def encode(self, text: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Tensor:
        """Ids of a user's message, or of a chat. -> [n]"""
        return encode(self.tokenizer, text, tools, self.allow_special_tokens)[0]

    def context_ids(self, text: str) -> list[int]:
        """Ids of a text that no question after it can change."""
        return context_ids(self.tokenizer, text, self.allow_special_tokens)

    def question_ids(self, text: str, question: str, context: list[int]) -> list[int]:
        """Ids of a question after `context_ids` of a text."""
        return question_ids(self.tokenizer, text, question, context, self.allow_special_tokens)

    def new_sequence(self) -> Sequence:
        cache = Cache(self.model, self.method, self.budget, tokenizer=self.tokenizer, **self.cache_options)
        if self.host_budget is not None:
            cache.share_host_budget(self.host_budget)
        return Sequence(self, cache)

    def sequence_of(self, cache: Cache, token_ids: list[int]) -> Sequence:
        """The sequence of a cache that was saved, with its own method and budget."""
        return Sequence(replace(self, method=cache.method, budget=cache.budget), cache, token_ids)

    def chunk_size(self, tokens: int) -> int:
        """Tokens of one forward pass of a prefill of so many."""
        retrieval = self.method.retrieval
        if retrieval and retrieval.needs == "surprise":  # known only after a pass, needed before tokens are offloaded
            near = retrieval.sizes(self._budget.tokens(tokens)).near
            return min(self.prefill_chunk_size or PREFILL_CHUNK_SIZE, near)
        if self.prefill_chunk_size:
            return self.prefill_chunk_size
        if retrieval and retrieval.window:
            size = GPU_PREFILL_CHUNK_SIZE if self.device.type == "cuda" else PREFILL_CHUNK_SIZE
            return max(1, size // retrieval.window) * retrieval.window
        return tokens if tokens <= context_length(self.model) else PREFILL_CHUNK_SIZE

    def kept(self, tokens: int) -> int:
        """The tokens kept of so many, per KV head, on average; with a retrieval method, those on the device."""
        return tokens if self._keeps_all else min(tokens, self._budget.tokens(tokens))

    def longest_head(self, kept: int) -> int:
        """The most tokens of one KV head, where each keeps so many on average."""
        sure = getattr(self.method.heads, "alpha", 1.0)  # KV heads share the rest
        return min(kept + int((1 - sure) * kept) * (key_shape(self.model)[0] - 1), context_length(self.model))

    def held_over_history(self, tokens: int) -> int:
        """The most tokens on the device while the host has the whole prompt, per KV head, on average over layers.

        These are what is kept, or what a draft is decoded from, and all tokens of two layers; on a GPU of two more,
        which are copied there meanwhile.
        """
        method, kept = self.method, self.kept(tokens)
        if method.layers.layer_weight is not None:  # it compares all layers before it evicts
            return tokens
        if method.draft:
            kept = method.draft.kept(kept, tokens)
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        held = 4 if self.device.type == "cuda" else 2
        return min(tokens, kept * (SPARE if method.across_layers else 1) + held * tokens // layers)

    @property
    def _keeps_all(self) -> bool:
        return self.method.scorer is None and not self.method.retrieval

    @property
    def is_exact(self) -> bool:
        """Whether every answer is that of the whole model: all keys and values are kept as they are."""
        return self._keeps_all and not self.cache_options.get("storage")

    @property
    def _budget(self) -> Budget:
        return Budget(self.method.check(self.budget))

    def check_length(self, prompt: int, max_new_tokens: int) -> None:
        """Refuse what exceeds the model's context length, unless the method extends it."""
        check_length(self.method, context_length(self.model), prompt, max_new_tokens)


class Sequence:
    """Prefill a prompt, and extend it by tokens."""

    def __init__(self, config: SequenceConfig, cache: Cache, token_ids: list[int] | None = None):
        self.config, self.cache = config, cache
        self.token_ids = token_ids or []  # the tokens the cache has seen
        self.has_prefill = False  # `prefill` or `extend` were called, and no answer was generated since
        self.cuts: tuple[int, ...] = ()  # the ends of the parts of its prompt that were evicted from by themselves
        self.defers = False  # the whole prompt is evicted from at once, however many chunks it is prefilled in
        self.last_logits: Tensor | None = None  # after the last token, where the method needs surprise

    def fork(self) -> Sequence:
        """An independent copy."""
        fork = copy.copy(self)
        fork.cache, fork.token_ids = self.cache.fork(), list(self.token_ids)
        return fork

    def continue_from(self, history: History, ids: list[int], from_message: int) -> None:
        """Begin after the tokens of a history, which gets those that are prefilled from now on.

        from_message: where the newest message begins; methods that sum over a prompt's queries sum over that one's
        """
        self.cache.continue_from(history, ids, from_message)
        self.token_ids = ids

    @property
    def history(self) -> History | None:
        backend = self.cache.backend
        return backend.history if isinstance(backend, EvictingBackend) else None

    def drop_queries(self) -> None:
        """Hold the history alone: those that go on after it prefill with queries of their own."""
        backend = self.cache.backend
        assert isinstance(backend, EvictingBackend)
        backend.query_buffer.queries.clear()

    def drop_history(self) -> None:
        """Go on with what is held on the device alone."""
        backend = self.cache.backend
        if isinstance(backend, EvictingBackend) and backend.history is not None:
            backend.stored_bytes, backend.history = backend.history.nbytes, None

    def accept(self, count: int) -> None:
        """Keep the first of the tokens that the last pass verified, and take the others back."""
        del self.token_ids[len(self.token_ids) - self.cache.croppable + count :]
        self.cache.accept(count)

    def set_question(self, question: str, tokens: int) -> None:
        """Capture the question's queries, for a method that retrieves with them, before a prefill of so many tokens."""
        retrieval, model = self.config.method.retrieval, self.config.model
        if question.strip() and retrieval and "question" in retrieval.index.needs:
            user = UserText(self.config.tokenizer, question, allow_special_tokens=self.config.allow_special_tokens)
            ids = torch.tensor([user.ids(user.hide(question))])
            edge = retrieval.sizes(self.cache.backend.budget.tokens(tokens)).near
            queries = capture_question_queries(model, ids.to(self.config.device), self.cache.rotations, edge)
            self._retrieval_backend.question = queries

    def prefill(self, ids: Tensor, progress: ProgressCallback = None) -> Tensor:
        """Prefill the ids the cache does not hold yet, in chunks. ids [n] -> logits after the last one [vocabulary]"""
        began, start, logits = time.perf_counter(), len(self.token_ids), None
        while len(chunk := self.next_chunk(ids)):
            logits = self.forward(chunk)[-1].clone()
            if self.config.method.retrieval:
                trim()
            if progress:
                progress(Progress(len(self.token_ids) - start, len(ids) - start, time.perf_counter() - began))
        assert logits is not None
        self.cache.tracker.mark_prompt()
        self.has_prefill = True
        return logits

    def next_chunk(self, ids: Tensor, limit: int | None = None) -> Tensor:
        """The ids that the next forward pass prefills. limit: at most so many, where that changes nothing"""
        start, size = len(self.token_ids), min(self.config.chunk_size(len(ids)), self.cache.chunk_limit)
        if limit and self.defers:
            size = min(size, limit)
            size += -(start + size) % getattr(self.config.method.memory, "chunk", 1)  # not within a method's own chunk
        if self.defers:
            size += start + size == len(ids) - 1  # a last chunk of one token would pass for a decode step
        return ids[start : start + size]

    def defer_eviction(self, tokens: int) -> bool:
        """Evict at the end of a prefill of so many alone, if the method and memory allow. -> whether they do"""
        config, self.defers = self.config, self.history is not None
        if self.defers:  # nothing of it stays on the device until then
            self.cache.defer_eviction(tokens)
            return True
        too_long = config.method.extends_context and tokens > self.cache.context_length
        if config.method.retrieval or too_long or config.chunk_size(tokens) < tokens - len(self.token_ids):
            return False
        free = free_device_bytes(config.device)
        size = row_bytes(config.model, tokens)
        fits = free is None or size <= MEMORY_FRACTION * free
        self.defers = bool(agree_on_least(self.cache.model, fits))
        if self.defers:
            self.cache.defer_eviction(tokens)
        return self.defers

    def extend(self, ids: Tensor, keep: int = 1) -> Tensor:
        """Append tokens. ids [q] -> logits of the last `keep` of them, 0: of all [keep, vocabulary]"""
        self.has_prefill = True
        size, logits = self.config.chunk_size(len(ids)), []
        while len(ids):
            chunk, ids = ids.tensor_split([min(size, self.cache.chunk_limit)])
            logits.append(self.forward(chunk, keep))
        return torch.cat(logits)[-keep:]

    def forward(self, ids: Tensor, keep: int = 1) -> Tensor:
        """Run one forward pass. ids [q] -> logits of the last `keep` of them [keep, vocabulary]"""
        model = self.config.model
        self.before_forward(ids)
        shown = 0 if self.needs_all_logits else keep
        with torch.inference_mode(), fused_ops(model, shown), long_prompt(model, len(ids)):
            batch = upload(ids[None], self.config.device)
            logits = model(batch, past_key_values=self.cache, logits_to_keep=shown).logits[0]
        self.after_forward(ids, logits)
        return logits[-keep:]

    @property
    def _needs(self) -> str:
        retrieval = self.config.method.retrieval
        return retrieval.needs if retrieval else ""

    @property
    def _retrieval_backend(self) -> RetrievalBackend:
        backend = self.cache.backend
        assert isinstance(backend, RetrievalBackend)
        return backend

    @property
    def needs_all_logits(self) -> bool:
        return self._needs == "surprise"

    def before_forward(self, ids: Tensor) -> None:
        """Give the cache the text's marks of the next tokens. ids [q]"""
        if self._needs == "sentences":
            self._retrieval_backend.set_token_marks(0, self.config.sentences.mark_ends(ids), self.cache.seen)

    def after_forward(self, ids: Tensor, logits: Tensor) -> None:
        """Record tokens that the model has processed. ids [q], logits after each, or after the last"""
        if self.needs_all_logits:
            self._retrieval_backend.set_token_marks(0, self._surprise(logits, ids))
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


class QueryCapture(HFCacheAdapter):
    """Records every layer's attention call, and caches nothing."""

    seen = 0

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.calls[index] = call
        return call.hf_attention()


def capture_question_queries(
    model: Any, ids: Tensor, rotations: dict[int, Rotation | None], edge: int
) -> dict[int, Tensor]:
    """The question's queries as they meet offloaded keys. ids [1, x] -> layer: [x, kv_heads * dim]"""
    capture = QueryCapture(model)
    with torch.inference_mode():
        model(ids, past_key_values=capture, logits_to_keep=1)
    found = {}
    for index, call in capture.calls.items():
        query, rotation = call.query[0], rotations.get(index)
        if rotation is not None:
            positions = torch.arange(query.shape[1], device=query.device)
            query = rotation.rotate(query, edge - positions)
        found[index] = concat_heads(query, call.key.shape[1])
    return found
