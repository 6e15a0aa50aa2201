"""A request: one prompt, how its answer is sampled, and the answer so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise

import torch
from torch import Tensor

from kvkeep.cache.decode.draft_pool import draft_tokens
from kvkeep.engine.detokenizer import Answer
from kvkeep.engine.logit_edits import Edit
from kvkeep.engine.memory import trim
from kvkeep.engine.progress import Progress, ProgressCallback
from kvkeep.engine.sampling import ConstraintState, Generation, TokenLogprobs
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadInput, StoreFull
from kvkeep.model.hf_cache import vocabulary_size
from kvkeep.storage.ragged import GROWTH


class State(Enum):
    """How far a request is."""

    WAITING = auto()  # nothing of its prompt is prefilled
    PREFILLING = auto()  # it has a sequence
    DRAFTING = auto()  # its first token is sampled, and its draft is due
    SAMPLED = auto()  # its first token is sampled, and perhaps not on the host yet
    PREFILLED = auto()  # its first token is delivered, and it waits for a row
    DECODING = auto()  # it has a row
    GUESSING = auto()  # exact: its next tokens are guessed by a request of their own
    VERIFYING = auto()  # exact: its guesses wait for a pass over the history
    DONE = auto()  # answered, failed or cancelled; an answer has its row until the end of the step


FEWEST_GUESSES, MOST_GUESSES = 2, 32  # of an exact answer, at a time
IN_QUEUE = State.WAITING, State.PREFILLING, State.VERIFYING
ENDS = {State.WAITING, State.DONE}  # of any state: out of memory, a request begins again
NEXT = {
    State.WAITING: {State.PREFILLING, State.PREFILLED} | ENDS,
    State.PREFILLING: {State.DRAFTING, State.SAMPLED} | ENDS,
    State.DRAFTING: {State.SAMPLED} | ENDS,
    State.SAMPLED: {State.PREFILLED, State.GUESSING, State.VERIFYING} | ENDS,
    State.PREFILLED: {State.DECODING} | ENDS,
    State.DECODING: ENDS,
    State.GUESSING: {State.VERIFYING} | ENDS,
    State.VERIFYING: {State.GUESSING, State.VERIFYING} | ENDS,
    State.DONE: {State.DONE},  # with an error: a step was cut short before its cache was complete
}


@dataclass
class Agreement:
    """How many guesses of an exact answer were right."""

    passes: int = 0  # over the history
    guessed: int = 0
    right: int = 0
    next_guesses: int = 8
    falls: bool = False

    @staticmethod
    def total(several: list[Agreement]) -> dict[str, int]:
        """The sums of several answers, as usage and metrics show them."""
        names = "passes", "guessed", "right"
        return {name: sum(getattr(each, name) for each in several) for name in names}

    def adapt(self, guessed: int, right: int) -> None:
        """After a pass. Guess more while all are right, and fewer while less than half of them are."""
        self.falls = right < guessed / 2
        if right == guessed:
            self.next_guesses = min(MOST_GUESSES, 2 * self.next_guesses)
        elif self.falls:
            self.next_guesses = max(FEWEST_GUESSES, self.next_guesses // 2)


@dataclass(eq=False)
class Request:
    """A scheduler has it from `submit` until it is done: answered, failed or cancelled."""

    config: SequenceConfig
    ids: Tensor  # [n] the prompt; what the sequence has seen already is not prefilled again
    how: Generation = field(default_factory=Generation)
    continues: Sequence | None = None  # a sequence that has seen the beginning of the prompt
    question: str | None = None  # for methods that retrieve with it, before the prefill
    progress: ProgressCallback = None
    interactive: bool = False  # somebody reads the answer while it is decoded: long prompts must not hold it up
    prefill_only: bool = False  # without an answer
    keeps_cache: bool = False  # the sequence's cache holds the answer, too, when the request is done
    banned_first: tuple[int, ...] = ()  # tokens the answer must not begin with
    owner: str = ""  # whose it is
    client: str = ""  # who asks: clients take turns in the queue; empty: its owner
    cuts: tuple[int, ...] = ()  # ends of parts of the prompt, each of which is evicted from by itself
    whole_end: bool = False  # nothing is evicted from the last part, and for it
    find_stored: Callable[[], Sequence | None] | None = None  # a copy of a stored sequence to go on with
    shares_history: bool = True  # with requests that begin alike
    pin: Callable[[Sequence], str] | None = None  # stores the prompt, a text, when it is prefilled. -> its id
    logits: Tensor | None = None  # after the prompt, if the sequence has seen it to the end [vocabulary]

    def __post_init__(self) -> None:
        self.how.check_vocabulary(vocabulary_size(self.config.model))
        self.client = self.client or self.owner
        self._sequence = self.continues
        self.deltas: deque[str] = deque()  # text to be streamed
        self.state, self.cancelled = State.WAITING, False
        self.pinned = ""  # the id of a text that is stored
        self.eos_token_ids: set[int] = set()  # as the scheduler has them
        self.num_cached = 0  # tokens of the prompt that its sequence had seen before
        self.reserved = 0  # bytes its own cache may take
        self.packs = True  # its prompt may be prefilled together with others
        self.error: BaseException | None = None  # why there is no answer, or only part of one
        self.selection = ""  # "exact": as of a prompt prefilled at once; "running": evicted after every chunk
        self.created_s = time.perf_counter()
        self.first_token_s = self.done_s = 0.0  # after it was created
        self.kept_tokens, self.kept_bytes = 0.0, 0  # of its cache when the prompt was prefilled, per KV head; in all
        self.finish_reason = ""  # "stop": of its own accord, or at a stop text; "length", "cancelled", "error"
        self.streamed = 0  # characters of the answer in deltas so far
        self.notify: Callable[[], object] = lambda: None  # called after new text, and when the request is done
        self._begin_answer()

    def _begin_answer(self) -> None:
        self.answer = Answer(self.config.tokenizer, len(self.ids))
        self.logprobs: list[TokenLogprobs] = []  # of every token, if they are wanted
        self._constraint = ConstraintState(self.how.constraint) if self.how.constraint else None
        self.agreement, self.guessed = Agreement(), list[int]()  # of an exact answer, and what is to be verified
        self.steps = 0  # decode steps so far: tokens of the answer that went through the model
        self._stops_from = 0  # characters of the answer in which no stop text is looked for

    def move(self, state: State) -> None:
        assert state in NEXT[self.state], f"a request that is {self.state.name} cannot be {state.name}"
        self.state = state

    @property
    def started(self) -> bool:
        return self.state not in ENDS

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def sequence(self) -> Sequence:
        assert self._sequence is not None, "the request is not started, or done"
        return self._sequence

    @property
    def own_sequence(self) -> Sequence | None:
        """None: it is not started, or nobody keeps it."""
        return self._sequence

    def drop_sequence(self) -> None:
        """Free its cache, if nobody wants it."""
        if not self.keeps_cache:
            self._sequence = self.continues = None
            self.reserved = 0

    def start(self) -> None:
        """Make its sequence, with the question's queries captured, before the first chunk."""
        stored = self.find_stored() if self.find_stored and not self.continues else None
        sequence = self.continues or stored or self.config.new_sequence()
        if self.how.exact and sequence.history is None and not self.config.is_exact:
            raise StoreFull("exact=True verifies answers against a history, and host_memory= has no room for this one.")
        if self.question is not None:
            sequence.set_question(self.question, len(self.ids))
        self._sequence = sequence
        self.move(State.PREFILLING)
        self._prefill_began, self.num_cached = time.perf_counter(), len(sequence.token_ids)
        at_once = self.begin_part() or len(sequence.next_chunk(self.ids)) == self._to_prefill
        if self.config.method.scorer is not None:
            self.selection = "exact" if at_once and not self.cuts else "running"

    def begin_part(self) -> bool:
        """Begin the part of the prompt after what is prefilled. -> whether it is evicted from at its end alone"""
        seen = len(self.sequence.token_ids)
        self.sequence.cuts = tuple(cut for cut in self.cuts if cut <= seen)
        if self.whole_end and seen and seen == self.cuts[-1]:
            self.sequence.cache.tracker.mark_context()
        never = self.prefill_only and self.sequence.history is not None  # whoever goes on after it evicts
        return self.sequence.defer_eviction(self._part_end + never)

    @property
    def _part_end(self) -> int:
        """Tokens of the prompt up to the end of the part that is prefilled now."""
        seen = len(self.sequence.token_ids)
        return next((cut for cut in self.cuts if cut > seen), len(self.ids))

    def next_chunk(self, limit: int | None) -> Tensor:
        """The ids that the next forward pass prefills, within one part; limit: as in `Sequence.next_chunk`."""
        if self.state is State.VERIFYING:
            return torch.tensor([self.answer.ids[-1], *self.guessed])
        return self.sequence.next_chunk(self.ids[: self._part_end], limit)

    @property
    def ends_part(self) -> bool:
        """Whether the last chunk ended a part."""
        return len(self.sequence.token_ids) in (*self.cuts, len(self.ids))

    @property
    def _to_prefill(self) -> int:
        return len(self.ids) - self.num_cached

    @property
    def is_prefilled(self) -> bool:
        return len(self.sequence.token_ids) == len(self.ids)

    def ends_with(self, chunk: Tensor) -> bool:
        """Whether this chunk, the next one, is the last of the prompt."""
        return len(self.sequence.token_ids) + len(chunk) == len(self.ids)

    @property
    def can_settle_later(self) -> bool:
        """Whether the pass that ends this prompt need not be done before its first token is sampled."""
        method = self.config.method
        return not (self.prefill_only or method.retrieval or method.needs_passes)

    @property
    def can_draft_later(self) -> bool:
        """Whether a draft after this prompt may wait: for its first token, and for drafts after the next prompts."""
        if self.config.method.draft is None or self.prefill_only or self.pin is not None:
            return False
        return not self.interactive or self.config.kept(len(self.ids)) < len(self.ids)  # else there is none

    def goes_on_after(self, token: int) -> bool:
        """Whether the answer surely does not end with this token, its first."""
        how = self.how
        return how.max_new_tokens > 1 and token not in self.ends and not (how.stop or how.constraint)

    def is_end(self, token: int) -> bool:
        """Whether the answer ends before this token: it ends answers, or the constraint lets nothing follow."""
        return token in self.ends or bool(self._constraint and (self._constraint.over or self._constraint.error))

    @property
    def ends(self) -> set[int]:
        """The tokens that end the answer."""
        eos = set() if self.how.ignore_eos and not self.how.constraint else self.eos_token_ids
        return eos.union(self.how.stop_token_ids)

    @property
    def edit(self) -> Edit | None:
        """What changes the logits of its next token; None: nothing does."""
        how = self.how
        if not how.edits_logits:
            return None
        ends = sorted(self.eos_token_ids.union(how.stop_token_ids))
        return Edit(how, self.ids, self.answer.ids, ends, vocabulary_size(self.config.model))

    def report_progress(self) -> None:
        """Report how far the prompt is prefilled, after a chunk."""
        if self.config.method.retrieval:
            trim()
        if self.progress:
            done = len(self.sequence.token_ids) - self.num_cached
            self.progress(Progress(done, self._to_prefill, time.perf_counter() - self._prefill_began))

    @property
    def expected_tokens(self) -> int:
        """The tokens of prompt and answer that will be kept per KV head, about."""
        new, tokens = self.how.max_new_tokens, len(self.ids)
        if self.continues and self.continues.cache.tracker.frozen:
            return self.continues.cache.longest_head + tokens - len(self.continues.token_ids) + new
        if self.whole_end:
            return self.config.kept(self.cuts[-1]) + tokens - self.cuts[-1] + new
        return (tokens if self.config.method.scorer is None else self.config.kept(tokens)) + new

    @property
    def has_history(self) -> bool:
        """Whether the host has all of its prompt; before it begins, whether that is so if there is room."""
        if self._sequence is not None:
            return self._sequence.history is not None
        return self.find_stored is not None and not self.cuts and not self.config.method.retrieval

    @property
    def _tail_tokens(self) -> int:
        """New tokens of a history that stay on the device, since nobody goes on after them or the host has no room."""
        known = self._sequence and self._sequence.history
        return len(self.ids) - known.tokens if known and not known.makes_blocks else 0

    @property
    def prefill_tokens(self) -> int:
        """The most tokens per KV head while the prompt is prefilled."""
        tokens = len(self.ids)
        longest = max(end - start for start, end in pairwise((0, *self.cuts, tokens)))
        most = min(tokens, self.config.kept(tokens) + min(longest, self.config.chunk_size(tokens)))
        if self.has_history:
            most = min(tokens, self.config.held_over_history(tokens) + self._tail_tokens)
        elif self.find_stored and not self.cuts:  # a prompt in chunks is evicted from after the last one
            most = tokens
        return most + most // GROWTH

    @property
    def draft_tokens(self) -> int:
        """The tokens per KV head that a draft after the prefill takes, if its method wants one."""
        draft = self.config.method.draft
        if draft is None or (self.continues and self.continues.cache.tracker.frozen):
            return 0
        kept = draft.kept(self.config.kept(len(self.ids)), len(self.ids))
        return draft_tokens(self.config.model, draft.steps, kept)

    @property
    def own_bytes(self) -> int:
        """Bytes of its own cache, as long as that is not in a pool."""
        if self._sequence is None or self.state is State.WAITING:
            return 0
        known = self._sequence.history
        return max(self.reserved, self._sequence.cache.nbytes + (known.tail_bytes if known else 0))

    def restart(self) -> None:
        """Drop the answer so far; text that was streamed is not streamed again."""
        self._begin_answer()
        self._sequence, self.reserved = self.continues, 0
        self.move(State.WAITING)

    def count_kept(self) -> None:
        """Count what is kept when the prompt is prefilled."""
        cache = self.sequence.cache
        held = cache.backend.report(cache.tracker.seen)
        self.kept_tokens, self.kept_bytes = held.kept_per_head, held.bytes

    @property
    def selects_again(self) -> bool:
        """Whether the pass that verifies its guesses selects what is kept: too many of the last ones were wrong."""
        return self.agreement.falls and self.config.method.selects_by_queries

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the prompt is evicted or quantized."""
        return self.kept_tokens == len(self.ids) and not self.sequence.cache.bits

    def allowed(self) -> Tensor:
        """The tokens its constraint lets follow, as in `ConstraintState`."""
        assert self._constraint is not None
        return self._constraint.allowed(self.answer.ids)

    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take the next token of the answer."""
        if self._constraint and self._constraint.error:
            return self.finish(self._constraint.error)
        self.first_token_s = self.first_token_s or time.perf_counter() - self.created_s
        answer, stop, before = self.answer, self.how.stop, len(self.text)
        ends = self.is_end(token)
        if not ends:
            answer.add(token)
            self.logprobs += [logprobs] if logprobs else []
        self.finish_reason = "stop" if ends else "length" if len(answer.ids) >= self.how.max_new_tokens else ""
        if self.finish_reason:
            answer.finish()
            before = self._stops_from  # all of it is decoded again
        if len(answer.ids) <= self.how.min_tokens:
            self._stops_from = len(answer.text)
        elif answer.has_stop(stop, before):
            answer.cut(stop, self._stops_from)
            self.finish_reason = "stop"
        ends = bool(self.finish_reason)
        ready = len(answer.text) if ends else answer.held_from(stop)
        if ready > self.streamed:
            self.deltas.append(answer.text[self.streamed : ready])
            self.streamed = ready
            self._notify()
        if ends:  # last: another thread takes a request that is done for complete
            self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        self.drop_sequence()
        self.finish_reason = "error" if error else self.finish_reason or ("cancelled" if self.cancelled else "stop")
        self.error = error
        self.move(State.DONE)
        self.done_s = time.perf_counter() - self.created_s
        self._notify()

    def _notify(self) -> None:
        try:
            self.notify()
        except Exception:  # nobody listens any more
            self.cancelled = True


def too_long(request: Request) -> BaseException | None:
    try:
        request.config.check_length(len(request.ids), request.how.max_new_tokens)
    except BadInput as error:
        return error
    return None


def raise_numbered(errors: Iterable[BaseException | None]) -> None:
    """Raise one error that names every prompt that has one."""
    found = [f"prompt {number}: {str(error).splitlines()[0]}" for number, error in enumerate(errors) if error]
    if found:
        raise BadInput("; ".join(found))
