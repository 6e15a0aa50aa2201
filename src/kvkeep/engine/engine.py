"""`kvkeep.Engine`: prompts prefilled in chunks, answers decoded token by token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from kvkeep.arguments import AboveZero, Count, check_value
from kvkeep.cache.cache import Cache
from kvkeep.compress.defaults import BUDGET, CONTEXT_METHODS, PROMPT_METHODS
from kvkeep.compress.method import STORAGE, Method
from kvkeep.compress.parse import parse_budget
from kvkeep.engine.context import Context
from kvkeep.engine.detokenizer import Answer
from kvkeep.engine.driver import Driver, Handle
from kvkeep.engine.exact import exact_config
from kvkeep.engine.history_store import HistoryStore
from kvkeep.engine.lockstep import Follower, Leader
from kvkeep.engine.progress import ProgressCallback, ProgressOption, watch
from kvkeep.engine.prompts import Prompt, check_prompts, is_chat, newest_message, only_text, prompt_ids
from kvkeep.engine.request import Agreement, Request, raise_numbered, too_long
from kvkeep.engine.sampling import Generation, check_count
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.engine.store import Store
from kvkeep.errors import BadParameter, CacheMisuse, KvkeepError, UnknownName, UnsupportedModel
from kvkeep.model.chat import (
    check_ids,
    check_messages,
    check_text,
    check_tokenizer,
    eos_token_ids,
    with_question,
)
from kvkeep.model.fp8_model import check_weights, use_weights
from kvkeep.model.head_shards import head_shards
from kvkeep.model.hf_cache import uncompiled
from kvkeep.model.rope import learn_rotations
from kvkeep.storage.history import BLOCK

MOST_CONFIGS = 64  # of other methods and budgets, kept for the next request that has them
HISTORIES = "host", None
AUTO = {"coverage", "tau", "max_budget"}  # parameters of budget="auto", whatever the method


@contextmanager
def _known(id: str) -> Iterator[None]:
    try:
        yield
    except KeyError:
        raise UnknownName(f"there is no context {id!r}, or it is not yours; pin the text again.") from None


class Engine:
    """Generates from compressed caches.

    `generate` and `stream` for a prompt, `read` for a context with many questions, `chat` for a conversation.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: str | Method | None = None,
        budget: int | float | str | None = BUDGET,
        *,
        prefill_chunk_size: int | None = None,
        schedule: str | int | None = None,
        host_limit: int | None = None,
        disk: str | Path | None = None,
        storage: str | None = None,
        max_rows: int = 64,
        max_tokens: int | None = None,
        memory: int | None = None,
        max_waiting: int | None = None,
        target_itl: float | None = None,
        prefix_cache: Store | int | None = None,
        history: str | None = "host",
        host_memory: int | None = None,
        history_storage: str | None = None,
        allow_special_tokens: bool = False,
        weights: str | None = None,
        **parameters: Any,
    ):
        """method: None: `kvkeep_lookahead`, and `kvkeep_context` for texts that are read before a question is known;
        where a model cannot be run again beside its cache, `kvkeep` and `echo:near=8+shared`; split by tensor
        parallelism, `compactor+adakv`; without RoPE, `keydiff`.

        prefill_chunk_size: tokens of a prompt per forward pass; None: all where context length and method allow.

        max_rows: answers decoded at a time; max_tokens: per KV head, of all of them, allocated once; None: the pool
        grows as needed, by default within 80 % of what is free. memory: bytes of keys and values at a time, of all
        requests, in prefill and decode; who does not fit waits. max_waiting: more are refused by `submit`.

        target_itl: seconds between two tokens of an answer that somebody reads, while other prompts are prefilled: with
        more, prompts are prefilled sooner. None: 0.08 on a GPU; on a CPU as long as 256 tokens take.

        history: "host" keeps the keys and values of chats, contexts and pinned texts in host memory, for the next
        turn; None keeps none. host_memory: bytes of them; None: half of what is free. history_storage: "int8" or
        "int4" quantizes them; what a later turn attends to is then rounded. prefix_cache: a store of pinned texts, and
        without a history of compressed prefixes, or its bytes.

        allow_special_tokens: a control token's string in a prompt, a message or a question is that token; by default it
        is text, so that no text can end a message or begin another.

        weights: "fp8" changes the model itself: the linear products of its layers run in 8-bit floats, and the weights
        they had are freed; "fp8+head": the LM head, too. None: the model runs as it is. The rest as in `kvkeep.Cache`.
        """
        check_weights(weights)
        if prefill_chunk_size is not None:
            why = "use a whole number of tokens, at least two: a forward pass of one is a decode step"
            check_count("prefill_chunk_size", prefill_chunk_size, 2, why)
        counts = {"max_rows": max_rows, "max_tokens": max_tokens, "memory": memory, "max_waiting": max_waiting}
        counts["host_memory"] = host_memory
        if history not in HISTORIES:
            raise BadParameter(f"history={history!r}: use one of {', '.join(map(repr, HISTORIES))}.")
        if history_storage not in STORAGE:
            named = ", ".join(map(repr, STORAGE))
            raise BadParameter(f"history_storage={history_storage!r}: use one of {named}.")
        counts |= {} if isinstance(prefix_cache, Store) else {"prefix_cache": prefix_cache}
        for name, value in counts.items():
            if value is not None:
                check_count(name, value, 1, "use a whole number, at least one")
        options = {"schedule": schedule, "host_limit": host_limit, "disk": disk, "storage": storage}
        auto = {name: parameters[name] for name in AUTO & parameters.keys() if budget == "auto"}
        self._is_named = method is not None
        if method is None:
            method = first_allowed(model, PROMPT_METHODS, budget, parameters)
        self._asked = method, budget, {name: value for name, value in parameters.items() if name not in auto}, auto
        chosen = *parse_budget(method, budget, **parameters), prefill_chunk_size, options
        self.config = SequenceConfig(model, tokenizer, *chosen, allow_special_tokens=allow_special_tokens)
        self._sequence = self.config.new_sequence()
        self.config = replace(self.config, host_budget=self._sequence.cache.host_budget)
        self._max_waiting = max_waiting
        self._configs: dict[tuple[str, Any], SequenceConfig] = {}  # by method and budget, of requests that have others
        self._last: Request | None = None  # that answer
        if tokenizer is None:
            raise BadParameter(
                "tokenizer=None: an engine encodes prompts and decodes answers; give the model's, or use kvkeep.Cache."
            )
        check_tokenizer(tokenizer)
        check_value("target_itl", target_itl, AboveZero | None)
        eos = eos_token_ids(model, tokenizer)
        use_weights(model, weights)
        self.store = prefix_cache if isinstance(prefix_cache, Store) else Store(prefix_cache or 0)
        cache = self._sequence.cache
        self._driver = Driver(Scheduler(cache.model, eos, max_rows, max_tokens, memory, self.store, target_itl))
        has_history = history is not None and cache.compressed_layers and not cache.hf_layers
        histories = HistoryStore(cache, host_memory, history_storage) if has_history else None
        self.store.open(self.config, self._driver.lock, histories)

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
    def held_bytes(self) -> int:
        """Keys and values of all requests and stored prefixes, as `memory=` counts them."""
        with self._driver.lock:
            return self._driver.scheduler.memory.held_bytes

    @property
    def num_waiting(self) -> int:
        """Requests whose prompts are not prefilled to the end."""
        return self._driver.scheduler.held.num_waiting

    @property
    def sequence(self) -> Sequence:
        """The sequence of the last answer of `stream` or `chat`, copied from the pool when somebody asks for it."""
        if self._last:
            self._driver.complete_cache(self._last)
            self._sequence = self._last.own_sequence or self._sequence
        return self._sequence

    @property
    def cache(self) -> Cache:
        """The cache of the last answer of `stream` or `chat`, complete when that is; or of `prefill` and `extend`."""
        return self.sequence.cache

    @property
    def token_ids(self) -> list[int]:
        """The tokens the cache has seen."""
        return self.sequence.token_ids

    @property
    def answer(self) -> Answer:
        """The last answer of `stream` or `chat`, with its token ids."""
        return self._last.answer if self._last else Answer(self.tokenizer)

    @property
    def agreement(self) -> Agreement:
        """How many guesses were right in the last answer of `stream` or `chat`, if that was exact."""
        return self._last.agreement if self._last else Agreement()

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
        return self._generate_all(check_prompts(prompt), **options)

    def _generate_all(
        self, prompts: list[str], *, question: str | None = None, rows: int | None = None, **options: Any
    ) -> list[str]:
        if rows is not None:
            check_count("rows", rows, 1, "at least one prompt is answered at a time; give a whole number")
        how = Generation.of(options)
        config = self._config_to_answer(self.config, how)
        requests = [Request(config, self.encode(prompt, question), how, question=question) for prompt in prompts]
        for request in requests:
            self.store.begin_alone(request)
        raise_numbered(too_long(request) for request in requests)
        self._driver.run(requests, rows or len(requests))
        raise_numbered(request.error for request in requests)
        return [request.text for request in requests]

    def submit(
        self,
        prompt: Prompt,
        *,
        question: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        method: str | Method | None = None,
        budget: int | float | None = None,
        owner: str = "",
        client: str = "",
        context: str | None = None,
        cache_prefix: bool | None = None,
        progress: ProgressCallback = None,
        **options: Any,
    ) -> Handle:
        """Answer a prompt beside all others; from any thread. Options as in `stream`.

        prompt: a text, the messages of a chat (tools: functions the model may call in it), or token ids [n]
        method, budget: for this request, in the place of the engine's
        owner: whose it is. Owners continue prefixes of their own, or public ones.
        client: who asks. Clients take turns in the queue; by default, owners do.
        context: the id of a text (`pin`) that the prompt, a text or one message, is a question about
        cache_prefix: prefill the prompt in parts that later requests can continue, long texts included, as
        engine/store.py says; False: all at once. None: chats in parts that end with messages, where the engine
        has a prefix_cache.
        """
        if (shards := self._sequence.cache.shards) and not self._driver.leader:
            raise CacheMisuse(
                f"{shards.size} processes share this model and have to run the same forward passes in the same order; "
                "threads would not: use generate, for many prompts at once, or stream, or kvkeep serve "
                "--tensor-parallel."
            )
        how = Generation.of(options)
        check_value("owner", owner, str)
        check_value("client", client, str)
        check_value("cache_prefix", cache_prefix, bool | None)
        check_value("progress", progress, Callable | None)
        if context is not None:
            check_value("context", context, str)
            request = self._about_context(owner, client, context, only_text(prompt), how)
        else:
            ids = prompt_ids(self.config, prompt, question, tools)
            config = self._config_to_answer(self._config_for(method, budget), how)
            request = Request(config, ids, how, question=question, owner=owner, client=client)
            if self._sequence.cache.compressed_layers:
                agnostic = self._without_question if method is None else None
                self.store.share(request, cache_prefix, is_chat(prompt), agnostic)
            self.store.begin_alone(request)
        request.progress = progress
        return self._submit(request)

    def _submit(self, request: Request) -> Handle:
        """Have a thread step until it is done; somebody waits for its next token meanwhile."""
        request.interactive = True
        handle = Handle(self._driver.submit(request, self._max_waiting), self._driver)
        self._driver.start()
        return handle

    def _config_to_answer(self, config: SequenceConfig, how: Generation) -> SequenceConfig:
        """The same; for an exact answer one that evicts nothing while it is decoded."""
        histories = self.store.histories
        return exact_config(config, histories.pool if histories else None) if how.exact else config

    def pin(
        self,
        text: str,
        *,
        owner: str = "",
        public: bool = False,
        method: str | Method | None = None,
        budget: int | float | None = None,
        progress: ProgressCallback = None,
    ) -> str:
        """Prefill a text once and store it. -> an id, for `submit(question, context=…)`

        public: for requests of any owner; method, budget: in the place of the engine's. Its method is taken if it
        needs no question, else that of an engine without a method: no question is known here.
        """
        check_value("progress", progress, Callable | None)
        request = self._pin_request(text, owner, public, method, budget)
        request.progress = progress
        self._driver.prefill(request)
        return request.pinned

    def submit_pin(self, text: str, **options: Any) -> Handle:
        """Do what `pin` does without waiting: the id is `request.pinned` when the request is done.

        options: as in `pin`, with client as in `submit`, without progress
        """
        return self._submit(self._pin_request(text, **options))

    def withdraw(self, request: Request) -> None:
        """Give up a request of `submit_pin`; what the step under way stores is removed again.

        A text that its owner has pinned before, or meanwhile, stays.
        """
        ended = threading.Event()
        request.notify = ended.set
        request.cancelled = True
        if not request.done:
            ended.wait()
        if request.pinned:
            with suppress(KeyError):  # removed meanwhile
                self._driver.unpin(request.owner, request.pinned, once=True)

    def _pin_request(
        self,
        text: str,
        owner: str = "",
        public: bool = False,
        method: str | Method | None = None,
        budget: int | float | None = None,
        client: str = "",
    ) -> Request:
        self._check_stores_texts()
        self._check_holds_text()
        check_text("text", text)
        check_value("owner", owner, str)
        check_value("public", public, bool)
        config, find_stored = self._config_for(method, budget), None
        ids = torch.tensor(config.context_ids(text))
        if histories := self.store.histories_for(config, ids):
            histories.prepare(owner, ids)
            find_stored = partial(histories.begin_text, owner, config, ids)
        else:
            config = self._reading_config(method, budget, pinned=True)
        request = Request(config, ids, Generation(1), prefill_only=True, owner=owner, client=client)
        request.find_stored, request.pin = find_stored, partial(self.store.pin, owner, text, public)
        return request

    def unpin(self, id: str, *, owner: str = "") -> None:
        """Remove a stored text of this owner; a public one stays as long as another owner has stored it, too."""
        self._check_stores_texts()
        check_value("id", id, str)
        check_value("owner", owner, str)
        with _known(id):
            self._driver.unpin(owner, id)

    def _check_stores_texts(self) -> None:
        if not self.store.max_bytes:
            raise BadParameter("this engine stores no prefixes; make it with prefix_cache=, a number of bytes.")

    def _about_context(self, owner: str, client: str, id: str, question: str, how: Generation) -> Request:
        """A request that goes on with a stored text."""
        self._check_stores_texts()
        with _known(id):
            text, sequence = self.store.loaded(owner, id)
        check_text("question", question)
        config = self._config_to_answer(sequence.config, how)
        if how.exact and not (text.in_history or config.is_exact):
            raise BadParameter("exact=True: what was evicted of this text is gone; store it with history='host'.")
        ids = torch.tensor(text.ids + config.question_ids(text.text, question, text.ids))
        request = Request(config, ids, how, question=question, owner=owner, client=client)
        if text.in_history and self.store.histories:
            self.store.histories.prepare(owner, ids)
        request.find_stored = partial(self.store.after_text, owner, id, config, ids)
        return request

    def _config_for(self, method: str | Method | None, budget: int | float | str | None) -> SequenceConfig:
        """The engine's own, with another method or budget; checked when first asked for."""
        if method is None and budget is None:
            return self.config
        check_value("budget", budget, int | float | str | None)
        name = method if isinstance(method, str) else repr(method), budget
        if (config := self._configs.get(name)) is None:
            own, asked, parameters, auto = self._asked
            given = (parameters if method is None else {}) | (auto if budget is None else {})
            spec, most = own if method is None else method, asked if budget is None else budget
            made, most = parse_budget(spec, most, **given)
            config = replace(self.config, method=made, budget=most)
            config.new_sequence()  # raises what is wrong with them
            if len(self._configs) >= MOST_CONFIGS:
                self._configs.clear()
            self._configs[name] = config
        return config

    def warmup(self, rows: int | None = None, progress: Callable[[str], None] = lambda text: None) -> None:
        """Allocate, compile and capture for so many rows, None: for all, so that the first answer is as fast as others.

        progress: told what is being done
        """
        check_value("progress", progress, Callable)
        most = self._driver.scheduler.held.max_rows
        check_count("rows", most if rows is None else rows, 1, "use a whole number, at least one")
        reading = self._reading_config(None, None, pinned=bool(self.store.max_bytes))
        self._driver.warmup(self.config, reading, min(rows or most, most), progress)

    def lead(self, send: Callable[[bytes], None], failed: Callable[[BaseException], None], **parts: Any) -> None:
        """Have `submit` and `pin` answer together with the engines of other processes, which `follow` this one.

        send: to each of them; failed: told of an error that none can go on after; parts: as in engine/lockstep.py
        """
        self._driver.leader = Leader(self._driver.scheduler, self._parts(parts), send)
        self._driver.failed = failed

    def follow(self, receive: Callable[[], bytes], **parts: Any) -> NoReturn:
        """Do what the engine that leads does, until this process ends. receive: what it sends"""
        Follower(self._driver.scheduler, self._parts(parts), receive)
        self._driver.follow()

    def _parts(self, more: dict[str, Any]) -> dict[str, Any]:
        """What requests refer to. All engines join here, and find out together what takes a forward pass."""
        learn_rotations(self._sequence.cache.model)
        return {"config": self.config, "store": self.store, "histories": self.store.histories, **more}

    def close(self) -> None:
        """Cancel all answers under way, and free the pool."""
        self._driver.close()
        self.store.flush()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(
        self,
        text: str,
        *,
        question: str | None = None,
        method: str | Method | None = None,
        budget: int | float | None = None,
        progress: ProgressOption = None,
    ) -> Context:
        """Prefill a text once, to ask any number of questions about it.

        question: one that is known before: query-aware methods keep what it needs; others may be asked, too
        method, budget: in the place of the engine's. A method that an engine was given is taken even if it needs a
        question; `ask` then warns.
        progress: as in `stream`
        """
        check_value("progress", progress, Callable | bool | None)
        self._check_holds_text()
        check_text("text", text)
        config = self._config_for(method, budget)
        histories = self.store.histories_for(config, ids := torch.tensor(config.context_ids(text)))
        if histories and histories.make_room(len(ids) // BLOCK):
            begin = partial(histories.begin, "", config, ids)
            return Context.read(self._driver, config, text, question, progress, begin)
        config = config if question is not None else self._reading_config(method, budget)
        return Context.read(self._driver, config, text, question, progress)

    def _check_holds_text(self) -> None:
        """Refuse a model whose layers are all transformers' own: a cache of theirs cannot be forked for a question."""
        if not self._sequence.cache.compressed_layers:
            raise UnsupportedModel(
                f"{self._sequence.cache.name} has sliding-window or linear layers only, and none that holds a text for "
                "many questions; use engine.generate(text, question=…)."
            )

    def _reading_config(
        self, method: str | Method | None, budget: int | float | None, pinned: bool = False
    ) -> SequenceConfig:
        """The config for a text whose questions are not known. pinned: who asks them is not warned"""
        config = self._config_for(method, budget)
        if method is not None or (self._is_named and not pinned):
            return config
        return self._without_question(config)

    def _without_question(self, config: SequenceConfig) -> SequenceConfig:
        """The same, with a method that needs no question."""
        evicts_nothing = config.method.scorer is None
        if evicts_nothing or (self._is_named and not config.method.query_aware):
            return config
        return replace(config, method=self._context_method)

    @cached_property
    def _context_method(self) -> Method:
        """The first of CONTEXT_METHODS that works with the model."""
        _, budget, _, auto = self._asked
        return parse_budget(first_allowed(self.model, CONTEXT_METHODS, budget, auto), budget, **auto)[0]

    def load_context(self, path: str | Path) -> Context:
        """A saved `Context`, with its own method and budget."""
        return Context.load(self._driver, self.config, path, self.store.empty_history)

    def prefill(self, ids: Tensor, progress: ProgressOption = None) -> Tensor:
        """Prefill the ids the cache does not hold yet, in chunks. ids [n] -> logits after the last one [vocabulary]"""
        check_value("progress", progress, Callable | bool | None)
        ids = check_ids(self.model, ids, "ids")
        with self._driver.lock:
            seen = self.sequence.token_ids
            if len(seen) >= len(ids) or ids[: len(seen)].tolist() != seen:
                raise CacheMisuse(
                    f"ids: these {len(ids)} do not go on after the {len(seen)} tokens that the cache holds; give those "
                    "and more, or use extend, which takes new ones alone."
                )
            with watch(progress, len(ids)) as report:
                return self.sequence.prefill(ids, report)

    def extend(self, ids: Tensor, keep: int = 1) -> Tensor:
        """Append tokens. ids [q] -> logits of the last `keep` of them, 0: of all [keep, vocabulary]"""
        check_value("keep", keep, Count)
        ids = check_ids(self.model, ids, "ids")
        with self._driver.lock:
            return self.sequence.extend(ids, keep)

    def stream(
        self,
        prompt: str,
        *,
        question: str | None = None,
        progress: ProgressOption = None,
        **options: Any,
    ) -> Iterator[str]:
        """The answer, detokenized incrementally.

        question: asked after the prompt; methods that can use it before the prompt do.
        progress: called after every chunk of the prefill, with tokens done and in total; None: a bar on a terminal, if
        the prefill takes more than a second; False: no bar.
        options: max_new_tokens=256, temperature=0.0 (the likeliest token), top_p=1.0, top_k=0 (all tokens), min_p=0.0,
        seed=0, stop=() (a text, or several, that end the answer), stop_token_ids=(), ignore_eos=False, min_tokens=0,
        logit_bias={} (by token id), frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, exact=False
        (True: verify every token against the whole history, so that the answer is that of `full`)
        """
        check_value("progress", progress, Callable | bool | None)
        self._check_no_prefill()
        return self._stream(self.encode(prompt, question), question, Generation.of(options), progress)

    def _stream(self, ids: Tensor, question: str | None, how: Generation, progress: ProgressOption) -> Iterator[str]:
        self._begin_sequence()
        yield from self._answer(ids, how, question, progress)

    def _begin_sequence(self) -> None:
        """Drop the last one; what of it is in the pool alone need not be copied."""
        if self._last:
            self._last.keeps_cache = False
        self._sequence = self.config.new_sequence()

    def _answer(
        self,
        ids: Tensor,
        how: Generation,
        question: str | None,
        progress: ProgressOption,
        begin: Callable[[], Sequence] | None = None,
    ) -> Iterator[str]:
        """Continue the engine's own sequence. begin: makes one that goes on after a history, in its place"""
        sequence, config = self._sequence, self._config_to_answer(self.config, how)
        with watch(progress, len(ids) - len(sequence.token_ids)) as report:
            continued = None if begin or how.exact else sequence
            request = Request(config, ids, how, continued, question, report, interactive=True, keeps_cache=True)
            request.find_stored = begin
            self.store.begin_alone(request)
            self._driver.submit(request)
            sequence.has_prefill, self._last = False, request
            yield from Handle(request, self._driver)

    def _check_no_prefill(self) -> None:
        """Refuse a new prompt where that would drop tokens prefilled by `prefill` or `extend`."""
        if self._sequence.has_prefill:
            raise CacheMisuse(
                f"this engine has prefilled {len(self.token_ids)} tokens, and a new prompt would drop them; "
                "use engine.read(text).ask(question), or another engine."
            )

    def encode(self, prompt: str, question: str | None = None) -> Tensor:
        """Input ids of a prompt, through the chat template. -> [n]"""
        return self.config.encode(with_question(prompt, question))

    def length(self, prompt: str, question: str | None = None) -> int:
        """Tokens of a prompt, through the chat template."""
        return len(self.encode(prompt, question))

    def chat(
        self,
        messages: list[dict[str, str]],
        *,
        progress: ProgressOption = None,
        **options: Any,
    ) -> str:
        """The answer to a conversation, options as in `stream`. One that continues the last reuses its cache."""
        how = Generation.of(options)
        check_value("progress", progress, Callable | bool | None)
        check_messages(messages)
        ids = self.config.encode(messages)
        if (histories := self.store.histories_for(self.config, ids)) and not self._sequence.has_prefill:
            self._begin_sequence()
            config = self._config_to_answer(self.config, how)
            begin = partial(histories.begin, "", config, ids, newest_message(self.config, ids))
            return "".join(self._answer(ids, how, None, progress, begin)).strip()
        if not self._continues(ids):
            self._check_no_prefill()
            self._begin_sequence()
        return "".join(self._answer(ids, how, None, progress)).strip()

    def _continues(self, ids: Tensor) -> bool:
        """Whether these ids begin with those of the cache, no forward pass of which was cut short."""
        seen = self.token_ids
        complete = (self._last is None or self._last.done) and not self.cache.in_forward
        begins = 0 < len(seen) < len(ids) and ids[: len(seen)].tolist() == seen
        return complete and begins and self.cache.seen == len(seen)


def first_allowed(model: Any, specs: tuple[str, ...], budget: Any, parameters: dict[str, Any]) -> str:
    """The first method that works with the model: some models cannot be run again beside their cache."""
    refused = KvkeepError if head_shards(uncompiled(model)) else UnsupportedModel  # split heads refuse a parameter
    for spec in specs[:-1]:
        with suppress(refused):
            Cache(model, spec, budget, **parameters)
            return spec
    return specs[-1]
