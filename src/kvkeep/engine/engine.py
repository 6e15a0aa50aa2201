"""`kvkeep.Engine`: prompts prefilled in chunks, answers decoded token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.engine.batch_generate import generate_batch
from kvkeep.engine.context import Context
from kvkeep.engine.detokenizer import Answer
from kvkeep.engine.sampling import Generation, check_count
from kvkeep.engine.sequence import ProgressCallback, SequenceConfig
from kvkeep.errors import CacheMisuse
from kvkeep.model.chat import check_messages, encode, with_question


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
        options = {"schedule": schedule, "host_limit": host_limit, "disk": disk, "storage": storage}
        how = parse(method, **parameters), budget, prefill_chunk_size, options
        self.config = SequenceConfig(model, tokenizer, *how)
        self.sequence = self.config.new_sequence()  # of the last answer of `stream` or `chat`
        self._streaming = False  # it is not complete: `chat` must not continue it

    @property
    def model(self) -> Any:
        return self.config.model

    @property
    def tokenizer(self) -> Any:
        return self.config.tokenizer

    @property
    def method(self) -> Method:
        return self.config.method

    @property
    def cache(self) -> Cache:
        """Of the last answer of `stream` or `chat`, or of `prefill` and `extend`."""
        return self.sequence.cache

    @property
    def token_ids(self) -> list[int]:
        """The tokens the cache has seen."""
        return self.sequence.token_ids

    @property
    def answer(self) -> Answer:
        """The last answer of `stream` or `chat`, with its token ids."""
        return self.sequence.answer

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Iterable[str], **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Iterable[str], **options: Any) -> str | list[str]:
        """The whole answer at once, options as in `stream`; or the answers to several prompts, `rows` at a time.

        Several prompts come without progress.
        """
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, **options))
        return generate_batch(self.sequence, prompt, **options)

    def read(self, text: str, *, question: str | None = None, progress: ProgressCallback = None) -> Context:
        """Prefill a text once, to ask any number of questions about it.

        question: one that is known before: query-aware methods keep what it needs; others may be asked, too
        """
        return Context.read(self.config.new_sequence(), text, question, progress)

    def load_context(self, path: str | Path) -> Context:
        """A saved `Context`, with its own method and budget."""
        return Context.load(self.config, path)

    def prefill(self, ids: Tensor, progress: ProgressCallback = None) -> Tensor:
        """Prefill the ids the cache does not hold yet, in chunks. ids [n] -> logits after the last one [vocabulary]"""
        return self.sequence.prefill(ids, progress)

    def extend(self, ids: Tensor, keep: int = 1) -> Tensor:
        """Append tokens. ids [q] -> logits of the last `keep` of them, 0: of all [keep, vocabulary]"""
        return self.sequence.extend(ids, keep)

    def stream(
        self,
        prompt: str,
        *,
        question: str | None = None,
        progress: ProgressCallback = None,
        **options: Any,
    ) -> Iterator[str]:
        """The answer, detokenized incrementally.

        question: asked after the prompt; methods that can use it before the prompt do.
        options: max_new_tokens=256, temperature=0.0 (the likeliest token), top_p=1.0, top_k=0 (all tokens), seed=0
        """
        self._check_no_prefill()
        return self._stream(self.encode(prompt, question), question, Generation.of(options), progress)

    def _stream(self, ids: Tensor, question: str | None, how: Generation, progress: ProgressCallback) -> Iterator[str]:
        sequence = self.sequence = self.config.new_sequence()
        self._streaming = True
        try:
            if question is not None:
                sequence.set_question(question, len(ids))
            yield from sequence.generate(ids, how, progress)
        finally:
            if self.sequence is sequence:  # no other answer was begun between two yields
                self._streaming = False

    def _check_no_prefill(self) -> None:
        """Refuse a new prompt where that would drop tokens prefilled by `prefill` or `extend`."""
        if self.sequence.has_prefill:
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
        progress: ProgressCallback = None,
        **options: Any,
    ) -> str:
        """The answer to a conversation, options as in `stream`. One that continues the last reuses its cache."""
        how = Generation.of(options)
        check_messages(messages)
        ids = encode(self.tokenizer, messages)[0]
        if not self._continues(ids):
            self._check_no_prefill()
            self.sequence, self._streaming = self.config.new_sequence(), False
        return "".join(self.sequence.generate(ids, how, progress)).strip()

    def _continues(self, ids: Tensor) -> bool:
        """Whether these ids begin with those of the cache, no forward pass of which was cut short."""
        seen = self.token_ids
        complete = not (self._streaming or self.cache.in_forward) and self.cache.seen == len(seen)
        return complete and 0 < len(seen) < len(ids) and ids[: len(seen)].tolist() == seen
