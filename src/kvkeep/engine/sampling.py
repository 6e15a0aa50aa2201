"""The options of `Engine.generate`, and sampling the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.engine.logit_edits import Edit, LogitEdits
from kvkeep.errors import BadParameter
from kvkeep.registry import did_you_mean
from kvkeep.storage.upload import upload

GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number

OTHER_NAMES = {  # names that other libraries use, or that this one used
    "do_sample": " Leave it out: an answer is sampled where temperature is above 0.",
    "key": " It is called owner= here.",
    "max_length": " max_new_tokens= counts the answer alone.",
    "max_tokens": " It is called max_new_tokens= here.",
    "min_new_tokens": " It is called min_tokens= here.",
    "rows": " It is for a list of prompts.",
    "progress": " A list of prompts is answered without it.",
}


def check_count(name: str, value: Any, least: int, why: str) -> None:
    """Refuse what is not a whole number of `least` or more, below 2**63."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < 2**63:
        raise BadParameter(f"{name}={value!r}: {why}.")


RANGES = {  # of options that are numbers
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
MAX_BIAS = 100


def check_range(name: str, value: Any, least: float, most: float) -> None:
    """Refuse what is not a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        raise BadParameter(f"{name}={value!r}: use a number from {least} to {most}.")


class Constraint(Protocol):
    """What one answer may say, token by token: a grammar."""

    def allowed(self) -> Tensor:
        """The tokens that may come next [vocabulary] bool, on the host; none: the answer ends."""

    def advance(self, token: int) -> None:
        """Take a token of the answer; the one that ends it is not told."""


@dataclass
class ConstraintState:
    """A constraint and the tokens it knows. What it raises ends its own answer alone."""

    make: Callable[[], Constraint]
    known: int = 0
    constraint: Constraint | None = None
    error: BaseException | None = None
    over: bool = False  # no token may follow

    def allowed(self, ids: Sequence[int]) -> Tensor:
        """The tokens allowed after these, the first of which it may know. -> [vocabulary], or [1] if all is allowed"""
        try:
            self.constraint = self.constraint or self.make()
            for token in ids[self.known :]:
                self.constraint.advance(token)
            self.known, allowed = len(ids), self.constraint.allowed()
            self.over = not bool(allowed.any())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.error = error
        return torch.ones(1, dtype=torch.bool) if self.over or self.error else allowed


@dataclass(frozen=True)
class TokenLogprobs:
    """ln of a token's probability as the model has it: before temperature, top_p, top_k and constraint."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, and theirs

    @classmethod
    def of(cls, found: Sequence[Sequence[float]], most: int) -> TokenLogprobs:
        """Read a row of `SamplingRows.logprobs`: found [2, 1 + most or more]"""
        (token, *tokens), (logprob, *logprobs) = found
        top = zip(map(int, tokens[:most]), logprobs, strict=False)
        return cls(int(token), logprob, list(top))


@dataclass(frozen=True)
class Generation:
    """The checked options of one answer."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: str | Sequence[str] = ()  # texts that end an answer, which does not include them
    logprobs: int | None = None  # the logprobs of every token, and of so many of the likeliest; None: of none
    constraint: Callable[[], Constraint] | None = None  # makes the constraint of an answer, a new one for each
    min_p: float = 0.0  # tokens less likely than this part of the likeliest one's probability are not sampled
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id, added to its logit
    frequency_penalty: float = 0.0  # subtracted for each time the answer has a token
    presence_penalty: float = 0.0  # subtracted once if the answer has a token
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt and answer, multiplies negative ones
    min_tokens: int = 0  # before so many no EOS, stop token or stop text ends an answer; a constraint may
    stop_token_ids: Sequence[int] = ()  # tokens that end an answer like EOS
    exact: bool = False  # verify its tokens against the whole history: the answer is that of `full`
    ignore_eos: bool = False  # EOS does not end an answer, unless a constraint has it

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 1, "an answer has at least one; give a whole number")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
                raise BadParameter(f"{name}={value!r} is not a finite number.")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1):
            given = f"temperature={self.temperature}, top_p={self.top_p}"
            raise BadParameter(f"{given}: use 0 or more, and a number in (0, 1].")
        check_count("top_k", self.top_k, 0, "use a whole number of tokens to sample from, or 0 for all of them")
        check_count("seed", self.seed, 0, "use a whole number, 0 or more, below 2**63")
        if self.logprobs is not None:
            check_count("logprobs", self.logprobs, 0, "use the number of likeliest tokens to show, 0 or more, or None")
        if self.constraint is not None and not callable(self.constraint):
            raise BadParameter(f"constraint={self.constraint!r}: give a function that makes one for an answer.")
        several = isinstance(self.stop, Iterable) and not isinstance(self.stop, str | Tensor)
        stop = tuple(self.stop) if several else (self.stop,)
        if not all(isinstance(text, str) and text for text in stop):
            raise BadParameter(f"stop={self.stop!r}: give a text, or a list of texts, none of them empty.")
        object.__setattr__(self, "stop", stop)
        self._check_edits()

    def _check_edits(self) -> None:
        for name, (least, most) in RANGES.items():
            check_range(name, getattr(self, name), least, most)
        check_count("min_tokens", self.min_tokens, 0, "use a whole number of tokens, 0 or more")
        if self.min_tokens > self.max_new_tokens:
            raise BadParameter(f"min_tokens={self.min_tokens} is more than max_new_tokens={self.max_new_tokens}.")
        for name in ("ignore_eos", "exact"):
            if not isinstance(value := getattr(self, name), bool):
                raise BadParameter(f"{name}={value!r}: use True or False.")
        if not isinstance(self.logit_bias, Mapping):
            raise BadParameter(f"logit_bias={self.logit_bias!r}: give a number for each of some token ids.")
        if not isinstance(self.stop_token_ids, Iterable) or isinstance(self.stop_token_ids, str | Mapping):
            raise BadParameter(f"stop_token_ids={self.stop_token_ids!r}: give a list of token ids.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                check_count(name, token, 0, "token ids are whole numbers, 0 or more")
        for token, bias in self.logit_bias.items():
            check_range(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids that a model with so many does not have."""
        for name in ("logit_bias", "stop_token_ids"):
            if (most := max(getattr(self, name), default=0)) >= size:
                raise BadParameter(f"{name} has token id {most}; this model's are 0 to {size - 1}.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Generation:
        """Make it from keyword arguments; unknown ones are refused by name."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                hint = OTHER_NAMES.get(name) or did_you_mean(name, known)
                raise BadParameter(f"'{name}' is not an option of an answer; these are: {', '.join(known)}.{hint}")
        return cls(**options)

    @property
    def filters(self) -> bool:
        """Whether only some of the tokens are sampled from."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def edits_logits(self) -> bool:
        """Whether the likeliest token may be another one than the model's."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(self.logit_bias or penalties or self.min_tokens)


class SamplingRows:
    """How every row of a batch is sampled, on the device."""

    def __init__(self, rows: int, device: Any) -> None:
        self.hows: list[Generation | None] = [None] * rows  # on the host: what a step has to compute
        self.temperature, self.top_p = torch.zeros(rows, device=device), torch.ones(rows, device=device)
        self.top_k, self.seed = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.edits = LogitEdits(device)

    @classmethod
    def of(cls, hows: Sequence[Generation], device: Any, edits: Sequence[Edit | None] = ()) -> SamplingRows:
        """Make rows that are sampled in these ways. edits: of each row, if any has one"""
        rows = cls(len(hows), device)
        for row, how in enumerate(hows):
            rows.set(row, how, edits[row] if edits else None)
        return rows

    def set(self, row: int, how: Generation | None, edit: Edit | None = None) -> None:
        """Sample a row this way from now on. None: the row is not in use"""
        self.hows[row] = how
        self.edits.set(row, edit)
        self.temperature[row].fill_(float(how.temperature) if how else 0.0)  # an assignment would wait for the device
        if how and how.temperature:
            self.top_p[row].fill_(how.top_p)
            self.min_p[row].fill_(how.min_p)
            self.top_k[row], self.seed[row] = how.top_k, how.seed

    def samples(self, rows: int) -> bool:
        """Whether any of the first rows is not greedy."""
        return any(how and how.temperature for how in self.hows[:rows])

    def is_greedy(self, rows: int) -> bool:
        """Whether the next token of each of the first rows is the model's likeliest."""
        return not (self.edits.rows or self.samples(rows))

    @property
    def constrained(self) -> bool:
        """Whether what a row may say next depends on what it has said."""
        return any(how and how.constraint for how in self.hows)

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor | None:
        """The sampled token, then the likeliest, and their logprobs, of the rows that want them.

        logits [rows, vocabulary], tokens [rows] -> [rows that want them, 2, 1 + the most that one wants], or None
        """
        hows = self.hows[: len(logits)]
        counts = {row: how.logprobs for row, how in enumerate(hows) if how and how.logprobs is not None}
        if not counts:
            return None
        rows = upload(list(counts), logits.device)
        each = logits[rows].double().log_softmax(-1)
        found = torch.cat([tokens[rows, None], each.topk(min(max(counts.values()), each.shape[1])).indices], 1)
        return torch.stack([found.double(), each.gather(1, found)], 1)

    def sample(self, logits: Tensor, positions: Tensor, allowed: Mapping[int, Tensor] | None = None) -> Tensor:
        """The next token of the first rows. logits [rows, vocabulary], positions of the sampled tokens [rows] -> [rows]

        The likeliest where temperature is 0; else one of those that min_p leaves, of these the top_k likeliest (0: all)
        that make up top_p. As in transformers and vLLM, top_p is of the probability that top_k leaves.

        allowed: by row, the tokens its constraint allows, on the host
        """
        logits = self.edits.apply(logits)
        if allowed:
            logits = _mask(logits, allowed)
        rows, tokens = len(logits), logits.argmax(-1)
        if self.samples(rows):
            temperature = self.temperature[:rows]
            scaled = logits.float() / temperature.clamp_min(1e-5)[:, None]
            if any(how and how.filters for how in self.hows[:rows]):
                scaled = _filter(scaled, self.top_p[:rows], self.top_k[:rows], self.min_p[:rows])
            sampled = (scaled + gumbel(self.seed[:rows], positions, logits.shape[1])).argmax(-1)
            tokens = torch.where(temperature > 0, sampled, tokens)
        self.edits.count(tokens)
        return tokens


def _mask(logits: Tensor, allowed: Mapping[int, Tensor]) -> Tensor:
    """Set to -inf what a row may not say. allowed: by row [vocabulary, or less: the rest is forbidden] or [1]: all"""
    masked = logits.clone()
    for row, mask in allowed.items():
        if len(mask) > 1:
            forbidden = torch.ones(logits.shape[1], dtype=torch.bool)
            forbidden[: len(mask)] = ~mask[: logits.shape[1]]
            masked[row].masked_fill_(upload(forbidden, logits.device), float("-inf"))
    return masked


def _filter(scaled: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf all but the top_k likeliest that make up top_p, of what min_p leaves; of equal ones the first."""
    least = scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
    scaled = scaled.masked_fill(scaled < least, float("-inf"))
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    beyond = torch.arange(scaled.shape[1], device=scaled.device) >= top_k[:, None]
    ordered = ordered.masked_fill(beyond & (top_k > 0)[:, None], float("-inf"))
    probs = ordered.softmax(-1)
    dropped = (probs.cumsum(-1) - probs >= top_p[:, None]) | (ordered == float("-inf"))
    return scaled.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), float("-inf"))


def gumbel(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Noise that depends on a row's seed and position alone: not on the batch, nor on the device. -> [rows, size]

    A counter-based generator (splitmix64's finalizer) in place of torch.Generator, whose stream rows would share.
    """
    stream = _mix(_mix(seeds) + positions)[:, None]
    bits = _mix(stream + torch.arange(size, device=seeds.device) * GOLDEN)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log().float()


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer; torch shifts arithmetically, so the sign is masked off."""
    x = x + GOLDEN
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)
