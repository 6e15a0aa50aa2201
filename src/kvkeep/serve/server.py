"""One engine, and the jobs of all clients on it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.engine.driver import Handle
from kvkeep.engine.engine import Engine
from kvkeep.engine.memory import trim
from kvkeep.engine.prompts import ChatIds, check_ids, only_text, prompt_ids
from kvkeep.engine.request import Request
from kvkeep.engine.store import Store
from kvkeep.engine.stored import Text
from kvkeep.errors import BadInput, UnknownName
from kvkeep.model.hf_cache import context_length
from kvkeep.serve.access import Keys, Limits
from kvkeep.serve.answers import Answer, Answers
from kvkeep.serve.chat_schemas import TokenizeRequest
from kvkeep.serve.failure import Failure, no_context, shortened
from kvkeep.serve.followers import Followers
from kvkeep.serve.grammar import Grammars
from kvkeep.serve.job import Job, Prompt, texts_of
from kvkeep.serve.metrics import Metrics
from kvkeep.serve.response_reply import ResponseStore
from kvkeep.serve.schemas import DetokenizeRequest
from kvkeep.serve.tools import ToolParser, tool_format

LONG = 32_768  # characters that take so long to tokenize that short prompts do not wait for them
PER_TOKEN = 8  # characters: texts have fewer, as a rule
IDLE_S = 2.0  # without an answer under way: then nobody waits for what is returned to the system


class Server:
    """`submit` a job; what it needs of the model's thread or of the disk, a thread of its own does."""

    def __init__(self, engine: Engine, name: str, keys: Keys | None = None, limits: Limits | None = None) -> None:
        self.engine, self.name = engine, name
        self.keys, self.limits = keys or Keys(), limits or Limits()
        self.created = int(time.time())
        self.live: set[Answers] = set()  # whose clients are waiting
        self.metrics = Metrics(self.live, engine.store)
        self.tool_format = tool_format(engine.tokenizer.chat_template)
        self.grammars = Grammars.of(engine.model, engine.tokenizer)
        self.followers: Followers | None = None  # where the model is split over processes
        self.responses = ResponseStore()
        self.max_model_len = context_length(engine.model)
        facts = kvkeep.__version__, name, engine.config.method.name, engine.config.budget
        self.fingerprint = f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:10]}"
        self.longest_token = max(map(len, engine.tokenizer.get_vocab()))  # in characters, or bytes, which are more
        self._short, self._long = TurnThread("kvkeep-submit"), TurnThread("kvkeep-submit-long")
        self._idle: asyncio.TimerHandle | None = None

    async def submit(self, owner: str, job: Job, client: str = "") -> Answers:
        """The answers under way; raises why there will be none.

        client: its address, by which limits and turns go where there are no keys
        """
        answers = self.admit(owner or client, job)
        about_text = job.context is not None  # which is tokenized with the question
        is_long = job.is_constrained or about_text or sum(map(job.num_characters, job.prompts)) > LONG
        thread = self._long if is_long else self._short
        work = thread.submit(owner or client, partial(self._submit_all, owner, job, answers))
        try:
            handles = await asyncio.wrap_future(work)
        except BaseException:
            self.live.discard(answers)  # who submits them sees that nobody waits
            work.add_done_callback(self._give_up)
            raise
        found = [self._answer(number, each, job) for number, each in enumerate(handles)]
        answers.begin(found, len(job.prompts), self.limits.max_seconds)
        if job.stores is None:
            self.metrics.watch(answers)
        return answers

    def _answer(self, number: int, handle: Handle, job: Job) -> Answer:
        parser = ToolParser(self.tool_format, job.parallel_calls) if job.calls_tools and self.tool_format else None
        prompt = job.prompts[number // job.n] if job.echo else ""
        echo = prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(prompt)
        return Answer(number, handle.request, parser, job.context, echo)

    async def tokenizing(self, owner: str, work: Callable[[Any], dict[str, Any]], asked: Any) -> dict[str, Any]:
        """The result of what needs the tokenizer, in its thread. It counts as an answer under way."""
        place = self.admit(owner, Job(asked.model or self.name, [""]))
        try:
            thread = self._long if len(asked.model_dump_json()) > LONG else self._short
            return await asyncio.wrap_future(thread.submit(owner, partial(work, asked)))
        finally:
            place.close()

    def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt, in vLLM's words; those of messages as the chat template puts them."""
        tokenizer, given = self.engine.tokenizer, asked.messages
        prompt: Any = asked.prompt if given is None else [message.as_template() for message in given]
        self.check_characters(prompt, Job(self.name, []))
        if given is None:
            ids = tokenizer(prompt, add_special_tokens=asked.add_special_tokens, verbose=False).input_ids
        else:
            tools = [tool.function.as_template() for tool in asked.tools or ()]
            ids = prompt_ids(self.engine.config, prompt, tools=tools or None).tolist()
        texts = tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": texts}

    def detokenize(self, asked: DetokenizeRequest) -> dict[str, Any]:
        return {"prompt": self.engine.tokenizer.decode(check_ids(self.engine.model, asked.tokens).tolist())}

    def admit(self, owner: str, job: Job) -> Answers:
        """A place among those under way, within the limits."""
        self.check_model(job.model)
        self.limits.check(job, sum(each.count for each in self.live if each.owner == owner))
        answers = Answers(owner, job.num_answers, self._close, self.fingerprint)
        self.live.add(answers)
        return answers

    def check_model(self, name: str) -> None:
        if name != self.name:
            said = f"there is no model {shortened(name)!r} here; it is called {self.name!r}."
            raise Failure(404, said, "model_not_found", "model")

    def store(self) -> Store:
        if not self.engine.store.max_bytes:
            raise BadInput("this server stores no contexts; it was started with --prefix-cache 0.")
        return self.engine.store

    def find_context(self, owner: str, name: str) -> Text:
        """A text that was given before."""
        with suppress(KeyError):
            return self.store().text(owner, name)
        raise no_context(name)

    def contexts(self, owner: str) -> list[dict[str, Any]]:
        """The contexts of this owner, and public ones."""
        found = []
        for name in list(self.store().entries):
            with suppress(Failure):
                found.append(context_object(self.find_context(owner, name)))
        return found

    def _submit_all(self, owner: str, job: Job, answers: Answers) -> list[Handle]:
        """All or none: in a thread where requests are tokenized and submitted."""
        if job.stores is not None:  # a text without an answer
            text, public = only_text(job.prompts[0]), job.stores == "public"
            self.check_characters(text, job)
            return [self.engine.submit_pin(text, owner=owner, client=answers.owner, public=public, **job.options)]
        if job.context is not None:
            job.check_context()
            self.find_context(owner, job.context)
        whose = {"owner": owner, "client": answers.owner, "context": job.context}
        options = job.options | self._constraint(job) | whose
        first = secrets.randbits(62) if job.seed is None else job.seed
        handles: list[Handle] = []
        try:
            for prompt in job.prompts:
                encoded = self._encode(prompt, job)
                most = job.max_tokens or self._most_tokens(encoded, options)
                for number in range(job.n):
                    if answers not in self.live:
                        raise ClientDisconnect
                    how = options | {"seed": (first + number) % 2**63, "max_new_tokens": most}
                    handles.append(self.engine.submit(encoded, **how))
        except BaseException as error:
            for handle in handles:
                handle.request.cancelled = True
            if job.context is not None and isinstance(error, KeyError | UnknownName):  # it was deleted just now
                raise no_context(job.context) from None
            raise
        return handles

    def _encode(self, prompt: Prompt, job: Job) -> Prompt:
        """Encode a prompt once for all its answers; a question about a context is encoded by the engine."""
        self.check_characters(prompt, job)
        if isinstance(prompt, str) and job.context is None:
            prompt = self.engine.tokenizer(prompt, verbose=False).input_ids  # may have control tokens, as at vLLM's
        if not prompt:
            raise BadInput("the prompt is empty; give the model something to read.")
        if job.context is not None or not isinstance(prompt[0], dict):
            return prompt
        return ChatIds(prompt_ids(self.engine.config, prompt, tools=job.tools or None).tolist())

    def check_characters(self, prompt: Prompt, job: Job) -> None:
        """Refuse what has more tokens than the context length by far, before all of it is tokenized.

        The beginning of a text has as many tokens as it has within the text, but for a few at its end.
        """
        count, length = job.num_characters(prompt), self.max_model_len
        method = parse(job.options["method"]) if "method" in job.options else self.engine.method
        if count <= PER_TOKEN * length or method.extends_context:
            return
        if count <= length * self.longest_token:
            beginning = "".join(texts_of(prompt))[: PER_TOKEN * length]
            if len(self.engine.tokenizer(beginning, verbose=False).input_ids) <= length + length // 8:
                return
        raise BadInput(
            f"the prompt has {count} characters, far more than the model's context length of {length} tokens; "
            "shorten it, or use a method for any length, such as streamingllm."
        )

    def _most_tokens(self, prompt: Any, options: dict[str, Any]) -> int:
        """The most tokens of an answer that asks for no number: what the context length leaves, within the limit."""
        length = len(prompt)
        if options["context"] is not None:
            text = self.store().text(options["owner"], options["context"])
            question = self.engine.config.question_ids(text.text, only_text(prompt), text.ids)
            length = len(text.ids) + len(question)
        left = self.max_model_len - length
        return min(left, self.limits.max_tokens) if left > 0 else self.limits.max_tokens

    def _constraint(self, job: Job) -> dict[str, Any]:
        """The grammar that an answer has to follow, if there is one."""
        if not job.tools and job.tool_choice not in ("none", "auto"):
            raise BadInput("tool_choice wants a tool to be called, and there are no tools; give some, or leave it out.")
        if job.tools and self.tool_format is None:
            raise BadInput("this model's chat template takes no tools; leave them out, or serve another model.")
        if job.calls_tools and self.tool_format and job.tool_choice != "auto":
            named = [each for each in job.tools if job.tool_choice in ("required", each["function"]["name"])]
            if not named:
                name = shortened(job.tool_choice)
                raise BadInput(f"tool_choice names {name!r}, which is not one of the tools; give its name.")
            return {"constraint": self.grammars.of_lark(self.tool_format.grammar(named))}
        return {"constraint": self.grammars.of_schema(job.schema)} if job.schema is not None else {}

    def _give_up(self, work: Future[list[Handle]]) -> None:
        """What was submitted for a client that has gone."""
        if not work.cancelled() and work.exception() is None:
            for handle in work.result():
                self.cancel(handle.request)

    def cancel(self, request: Request) -> None:
        """Cancel a request without waiting for the engine's step; remove afterwards a text that it stores."""
        request.cancelled = True
        if request.pin is not None:
            threading.Thread(target=self.engine.withdraw, args=(request,), daemon=True).start()

    def _close(self, answers: Answers) -> None:
        if answers in self.live:
            self.live.discard(answers)
            self.metrics.count(answers)
            self._trim_when_idle()

    def _trim_when_idle(self) -> None:
        """Return what many answers leave in the allocator, which keeps it, once nobody has waited for a while."""
        if self._idle:
            self._idle.cancel()
        if not self.live:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._trim)

    def _trim(self) -> None:
        if not self.live:
            threading.Thread(target=trim, name="kvkeep-trim", daemon=True).start()

    def model_object(self) -> dict[str, Any]:
        known = {"id": self.name, "object": "model", "created": self.created, "owned_by": "kvkeep"}
        return known | {"max_model_len": self.max_model_len}

    def close(self) -> None:
        self._short.close()
        self._long.close()
        self.engine.close()
        if self.followers:
            self.followers.close()


def context_object(text: Text) -> dict[str, Any]:
    return {
        "id": text.id,
        "object": "context",
        "tokens": len(text.ids),
        "bytes": text.nbytes,
        "public": text.public,
        "kvkeep": {"method": text.method, "budget": text.budget},
    }


class TurnThread:
    """Runs one piece of work of every owner, then the next of every owner. What is cancelled before is skipped."""

    def __init__(self, name: str) -> None:
        self.by_owner: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # the owner whose turn it is first
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1, name)

    def submit(self, owner: str, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            self.by_owner.setdefault(owner, deque()).append((future, work))
        self.thread.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        """Do the first work of the owner whose turn it is, which then is the last one."""
        with self.lock:
            owner = next(iter(self.by_owner))
            queue = self.by_owner.pop(owner)
            future, work = queue.popleft()
            if queue:
                self.by_owner[owner] = queue
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        """Wait until all that was submitted is done."""
        self.thread.shutdown()
