"""One engine, and the jobs of all clients on it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from kvkeep.engine.driver import Handle
from kvkeep.engine.engine import Engine
from kvkeep.engine.prefix_store import Entry, PrefixStore
from kvkeep.errors import BadInput
from kvkeep.model.chat import encode, eos_token_ids
from kvkeep.model.hf_cache import context_length
from kvkeep.serve.answers import Answer, Answers
from kvkeep.serve.failure import Failure
from kvkeep.serve.grammar import Grammars
from kvkeep.serve.job import Job, Prompt
from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits
from kvkeep.serve.metrics import Metrics
from kvkeep.serve.tools import ToolParser, tool_format

T = TypeVar("T")


class Server:
    """`submit` a job; what it needs of the model's thread or of the disk, a thread of its own does."""

    def __init__(self, engine: Engine, name: str, keys: Keys | None = None, limits: Limits | None = None) -> None:
        self.engine, self.name = engine, name
        self.keys, self.limits = keys or Keys(), limits or Limits()
        self.created = int(time.time())
        self.live: set[Answers] = set()  # whose clients are waiting
        self.metrics = Metrics(self.live, engine.prefixes)
        self.tool_format = tool_format(engine.tokenizer.chat_template)
        eos = sorted(eos_token_ids(engine.model, engine.tokenizer))
        vocabulary = engine.model.config.get_text_config(decoder=True).vocab_size
        self.grammars = Grammars(engine.tokenizer, vocabulary, eos)
        self._thread = ThreadPoolExecutor(1, "kvkeep-submit")  # one: tokenizers are not for several threads

    async def submit(self, owner: str, job: Job) -> Answers:
        """The answers under way; raises why there will be none."""
        answers = self.admit(owner, job)
        try:
            handles = await self.in_thread(self._submit_all, owner, job)
        except BaseException:
            self.live.discard(answers)
            raise
        parsers = [ToolParser(self.tool_format) if job.calls_tools and self.tool_format else None for _ in handles]
        found = [Answer(i, each.request, parser) for i, (each, parser) in enumerate(zip(handles, parsers, strict=True))]
        answers.begin(found, len(job.prompts), self.limits.max_seconds)
        self.metrics.watch(answers)
        return answers

    def admit(self, owner: str, job: Job) -> Answers:
        """A place among those under way, within the limits."""
        self.check_model(job.model)
        self.limits.check(job, sum(each.count for each in self.live if each.owner == owner))
        answers = Answers(owner, job.num_answers, self._close)
        self.live.add(answers)
        return answers

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """The one in which requests are tokenized and submitted."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise Failure(
                404, f"there is no model {name!r} here; it is called {self.name!r}.", "model_not_found", "model"
            )

    def store(self) -> PrefixStore:
        if self.engine.prefixes is None:
            raise BadInput("this server stores no contexts; it was started with --prefix-cache 0.")
        return self.engine.prefixes

    def find_context(self, owner: str, name: str) -> Entry:
        """A text that was given before. Prefixes of chats are stored, too, and are nobody's context."""
        with suppress(KeyError):
            if (entry := self.store().entry(owner, name)).pinned:
                return entry
        raise Failure(404, f"there is no context {name!r}, or it is not yours.", "context_not_found", "context")

    def _submit_all(self, owner: str, job: Job) -> list[Handle]:
        """All or none."""
        if job.context is not None:
            self.find_context(owner, job.context)
        options = job.options | self._constraint(job) | {"key": owner, "context": job.context}
        first = secrets.randbits(62) if job.seed is None else job.seed
        handles: list[Handle] = []
        try:
            for number, prompt in enumerate(prompt for prompt in job.prompts for _ in range(job.n)):
                handles.append(self._submit(prompt, job, options | {"seed": (first + number % job.n) % 2**63}))
        except BaseException:
            for handle in handles:
                handle.request.cancelled = True
            raise
        return handles

    def _submit(self, prompt: Prompt, job: Job, options: dict[str, Any]) -> Handle:
        if isinstance(prompt, str):
            prompt = self.engine.tokenizer(prompt, verbose=False).input_ids
        if not prompt:
            raise BadInput("the prompt is empty; give the model something to read.")
        tools = job.tools or None
        most = job.max_tokens or self._most_tokens(prompt, tools)
        return self.engine.submit(prompt, max_new_tokens=most, tools=tools, **options)

    def _most_tokens(self, prompt: Any, tools: Any) -> int:
        """Of an answer that asks for no number: what the context length leaves, within the limit."""
        length = len(prompt) if isinstance(prompt[0], int) else encode(self.engine.tokenizer, prompt, tools).shape[1]
        left = context_length(self.engine.model) - length
        return min(left, self.limits.max_tokens) if left > 0 else self.limits.max_tokens

    def _constraint(self, job: Job) -> dict[str, Any]:
        """The grammar that an answer has to follow, if there is one."""
        if job.tools and self.tool_format is None:
            raise BadInput("this model's chat template takes no tools; leave them out, or serve another model.")
        if job.calls_tools and self.tool_format and job.tool_choice != "auto":
            named = [each for each in job.tools if job.tool_choice in ("required", each["function"]["name"])]
            if not named:
                raise BadInput(f"tool_choice names {job.tool_choice!r}, which is not one of the tools; give its name.")
            return {"constraint": self.grammars.of_lark(self.tool_format.grammar(named))}
        return {"constraint": self.grammars.of_schema(job.schema)} if job.schema is not None else {}

    def _close(self, answers: Answers) -> None:
        if answers in self.live:
            self.live.discard(answers)
            self.metrics.count(answers)

    def model_object(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "kvkeep"}

    def close(self) -> None:
        self._thread.shutdown()
        self.engine.close()
