"""The bodies of requests, as OpenAI's API has them, and the job each asks for: what all have, texts and contexts.

Chats and the responses API are in chat_schemas.py.

A field that nobody knows is refused by name, as OpenAI does. One that OpenAI knows and we do not is ignored where that
changes no answer (IGNORED), else refused unless it has its default value (NEUTRAL).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvkeep.engine.sampling import MAX_BIAS, RANGES
from kvkeep.serve.job import Job, Prompt

IGNORED = {
    "client_metadata", "include", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "truncation", "user", "verbosity",
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "audio": None, "background": False, "best_of": 1, "conversation": None, "echo": False, "frequency_penalty": 0,
    "function_call": None, "functions": None, "logit_bias": {}, "max_tool_calls": None, "modalities": ["text"],
    "moderation": None, "presence_penalty": 0, "previous_response_id": None, "prompt": None, "suffix": None,
    "web_search_options": None,
}  # fmt: skip
MAX_N = 128
MAX_ITEMS, MAX_TOKENS = 10_000, 2**20  # of a list, before anything else is looked at
MIN_TOP_P = 1e-9  # the engine wants more than 0: the likeliest token alone
Count = Annotated[int, Field(ge=1, le=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(min_length=1, max_length=100)]
T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
MethodName = Annotated[str, Field(max_length=200)]
Budget = Annotated[float, Field(gt=0, le=2**31, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Penalty = Annotated[float, Field(ge=RANGES["frequency_penalty"][0], le=RANGES["frequency_penalty"][1])]
Repetition = Annotated[float, Field(ge=RANGES["repetition_penalty"][0], le=RANGES["repetition_penalty"][1])]


def check_unicode(value: Any) -> Any:
    """JSON can escape half a character, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, RecursionError):
        raise PydanticCustomError("unicode", "a text has half of a surrogate pair, or is nested too deeply") from None
    return value


def from_json(text: str) -> Any:
    """What a text says in JSON; the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise PydanticCustomError("nested", "the JSON in this text is nested too deeply") from None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, body: Any) -> Any:
        return check_unicode(body)


class Lenient(BaseModel):
    """Clients send back what they were sent, with fields of their own."""

    model_config = ConfigDict(extra="ignore")


class Compression(Strict):
    """How a prompt, or a text, is compressed."""

    method: MethodName | None = None  # another one than the server's
    budget: Budget | None = None

    def options(self) -> dict[str, Any]:
        """The options of `Engine.submit` and `Engine.pin`."""
        given: dict[str, Any] = {"method": self.method, "budget": _whole(self.budget)}
        return {name: value for name, value in given.items() if value is not None}


class Extension(Compression):
    """Fields of ours."""

    protocol: Literal["agnostic", "aware"] | None = None  # agnostic: what comes before the last message is compressed
    # without it, so that other requests may share it; aware: all of the prompt at once
    context: str | None = None  # the id of a text given to /v1/contexts
    exact: bool | None = None  # verify every token against the whole history: the answer is that of `full`

    def options(self) -> dict[str, Any]:
        """The options of `Engine.submit`."""
        given = super().options() | ({"exact": True} if self.exact else {})
        return given if self.protocol is None else given | {"cache_prefix": self.protocol == "agnostic"}


def _whole(number: float | None) -> int | float | None:
    """Tokens are a whole number, a fraction is less than 1."""
    return int(number) if number is not None and number >= 1 and number == int(number) else number


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(Strict):
    """What all APIs have."""

    model: str = Field(examples=["default"])
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kvkeep: Extension = Extension()

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        others = set(body) - {field.alias or name for name, field in cls.model_fields.items()}
        for name in others & NEUTRAL.keys():
            if body[name] is not None and body[name] != NEUTRAL[name]:
                raise PydanticCustomError("unsupported", "Unsupported parameter: {name}", {"name": name})
        return {
            name: value for name, value in body.items() if name not in others or name not in IGNORED | NEUTRAL.keys()
        }

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self) -> dict[str, Any]:
        """The options of `Engine.submit`. OpenAI samples unless told otherwise."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else max(self.top_p, MIN_TOP_P)
        return {"temperature": temperature, "top_p": top_p, **self.kvkeep.options()}

    def job_of(self, prompts: list[Prompt], logprobs: int | None, **more: Any) -> Job:
        """The job of these prompts, with the fields that all APIs have. logprobs: as of `Generation`"""
        options = self.options() | ({} if logprobs is None else {"logprobs": logprobs})
        return Job(self.model, prompts, stream=bool(self.stream), options=options, context=self.kvkeep.context, **more)


class Sampled(Body):
    """What chat and text completions have beyond that: OpenAI's, then what vLLM adds."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    max_tokens: Count | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_ITEMS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None  # 0 and -1: all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None

    def options(self) -> dict[str, Any]:
        others = {"n", "seed", "stop", "max_tokens"}  # the rest are options of an answer by the same name
        given = self.model_dump(include=Sampled.__annotations__.keys() - others, exclude_none=True)
        if self.top_k == -1:
            given["top_k"] = 0
        return super().options() | {"stop": self.stop or ()} | given


class CompletionRequest(Sampled):
    """POST /v1/completions"""

    prompt: str | TokenIds | Several[str] | Several[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _echoes_no_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo cannot be given with logprobs: prompts have none here")
        return self

    def job(self) -> Job:
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if single else self.prompt
        most = self.max_tokens or 16  # OpenAI's default
        return self.job_of(prompts, self.logprobs, n=self.n or 1, max_tokens=most, seed=self.seed, echo=bool(self.echo))


class DetokenizeRequest(Strict):
    """POST /detokenize, as vLLM has it"""

    model: str | None = None
    tokens: TokenIds


class ContextRequest(Compression):
    """POST /v1/contexts: a text that many requests will ask about, compressed once."""

    model: str = Field(examples=["default"])
    text: Annotated[str, Field(min_length=1)]
    public: bool = False  # requests with any key may ask about it
    kvkeep: Compression = Compression()  # the same as method and budget above, where chats have it

    def job(self) -> Job:
        """Make a job without an answer."""
        options = self.options() | self.kvkeep.options()
        return Job(self.model, [self.text], options=options, stores="public" if self.public else "private")
