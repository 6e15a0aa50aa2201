"""Compressed prefixes of prompts, kept for the requests that begin alike.

The rule: a request that shares prefixes is prefilled in parts, each evicted from by itself, and what is stored after a
part is found by the tokens of all parts so far. Where parts end depends on the tokens before alone (`cuts_of`). So a
stored cache is the one that its tokens alone give: nothing later, and nobody else's, took part in the selection, and an
answer is the same whether a prefix was found or computed. Answers are not stored: they were decoded token by token,
and what is evicted after them depends on that. The next turn of a chat prefills the last answer with its own message.

What that costs: no part knows the next question. So chats are cut at the ends of messages, their parts are compressed
by a method that needs no question unless a request names one, and the newest message stays whole. Long texts are cut
only if a request says so.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import serialize
from kvkeep.cache.cache import Cache
from kvkeep.cache.report import format_bytes
from kvkeep.cache.validate import check_prefix
from kvkeep.engine.history_store import PUBLIC, HistoryStore, hashed
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadCacheFile, StoreFull
from kvkeep.model.head_shards import agree_on_least
from kvkeep.storage import checkpoint

LEAST_PART = 32  # tokens: parts are not shorter, but for the last
LONGEST_PART = 1024  # of requests that share long texts
ID, DRAFT = re.compile(r"[\w-]{32}"), re.compile(r"\.[\w-]{32}-\w{8}(-old)?")  # names of folders, of our making
SAVED = "id", "owners", "public", "place", "nbytes", "pinned", "text", "cuts", "ids"  # of an entry


def cuts_of(ids: Tensor, end_of_turn: int | None, long_texts: bool = False) -> tuple[int, ...]:
    """The ends of the parts of a prompt, but for the last: after messages; of long texts, every LONGEST_PART tokens."""
    cuts, ends = [0], (ids[:-1] == end_of_turn).nonzero()[:, 0].add(1).tolist() if end_of_turn is not None else []
    for end in [*ends, len(ids)]:
        while long_texts and end - cuts[-1] > LONGEST_PART:
            cuts.append(cuts[-1] + LONGEST_PART)
        if end < len(ids) and end - cuts[-1] >= LEAST_PART:
            cuts.append(end)
    return tuple(cuts[1:])


@dataclass(eq=False)
class Entry:
    """A stored prefix."""

    id: str
    owners: Counter[str]  # how often each owner pinned it, by hash; one owner, unless it is public
    public: bool  # all find it, and it is dropped when its last owner removes it
    place: str  # the hash of its tokens, parts, method, budget and storage
    nbytes: int
    pinned: bool
    text: str  # of a context
    cuts: tuple[int, ...]
    ids: list[int]
    sequence: Sequence | None  # None: it is on disk until somebody asks for it
    method: str
    budget: int | float | None
    whole: bool = False  # its keys and values are in the histories, none of them here
    saved: bool = False

    @property
    def found_at(self) -> tuple[str, str]:
        """The owner who finds it, or PUBLIC, and its place."""
        return PUBLIC if self.public else next(iter(self.owners)), self.place


class PrefixStore:
    """Stores sequences by owner, method, budget, storage and tokens. The least recently used go first."""

    def __init__(self, max_bytes: int, folder: str | Path | None = None) -> None:
        """folder: where prefixes are saved, to be found again after a restart, or by id by another process"""
        self.max_bytes, self.folder = max_bytes, None if folder is None else Path(folder)
        self.entries: OrderedDict[str, Entry] = OrderedDict()  # by id, the least recently used first
        self.by_place: dict[tuple[str, str], Entry] = {}
        self.lock = threading.RLock()
        self.config: SequenceConfig | None = None
        self.device_lock: AbstractContextManager[Any] = nullcontext()
        self.writer = ThreadPoolExecutor(1, "kvkeep-prefixes")
        self.num_unsaved = 0  # that could not be written
        self.new_id: Callable[[], str] = partial(secrets.token_urlsafe, 24)
        self.histories: HistoryStore | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and what is known of them, measured on the tensors; those on disk alone included."""
        return sum(entry.nbytes for entry in list(self.entries.values()) if not entry.whole)

    def __len__(self) -> int:
        return len(self.entries)

    def longest(self, owner: str, config: SequenceConfig, ids: Tensor, cuts: Seq[int]) -> Sequence | None:
        """A copy of the one that has seen most of these ids, in parts that end at these cuts."""
        with self.device_lock, self.lock:
            for entry in self._matching(owner, config, ids, cuts):
                if found := self._copy(entry):
                    found.config = config
                    return found
        return None

    def _matching(self, owner: str, config: SequenceConfig, ids: Tensor, cuts: Seq[int]) -> Iterator[Entry]:
        """Give the entries that match, the longest first."""
        for place in reversed(list(_places(config, ids, cuts))):
            found = [self.by_place.get((who, place)) for who in (hashed(owner), PUBLIC)]
            yield from (entry for entry in found if entry)

    def get(self, owner: str, id: str) -> Sequence:
        """Copy a sequence. KeyError: there is none of this owner"""
        with self.device_lock, self.lock:
            if not (found := self._copy(self.entry(owner, id))):
                raise KeyError(id)
            return found

    def after_text(self, owner: str, id: str, config: SequenceConfig, ids: Tensor) -> Sequence:
        """A sequence that goes on after a stored text. ids: of the text and a question. KeyError: it is gone"""
        entry = self.entry(owner, id)
        if not entry.whole or self.histories is None:
            return self.get(owner, id)
        return self.histories.begin(owner, config, ids, len(entry.ids), asks=True)

    def config_of(self, owner: str, id: str) -> SequenceConfig:
        """The config of a sequence that `get` copies, which is in memory then."""
        if not (sequence := self._load(self.entry(owner, id))):
            raise KeyError(id)
        return sequence.config

    def prepare(self, owner: str, config: SequenceConfig, ids: Tensor, cuts: Seq[int]) -> None:
        """Load what `longest` will copy, in the thread that submits a request: steps wait for no disk."""
        for entry in self._matching(owner, config, ids, cuts) if self.folder else ():
            if self._load(entry):
                return

    def entry(self, owner: str, id: str) -> Entry:
        """Find an entry of this owner, or a public one. KeyError: there is none"""
        entry = self.entries.get(id) or self._saved_since(id)
        if not entry.public and hashed(owner) not in entry.owners:
            raise KeyError(id)
        return entry

    def pinned_by(self, owner: str) -> list[Entry]:
        """The texts that this owner has a claim to."""
        return [each for each in list(self.entries.values()) if each.pinned and hashed(owner) in each.owners]

    def add(self, owner: str, sequence: Sequence, pinned: bool = False, *, public: bool = False, text: str = "") -> str:
        """Keep a sequence, which nobody else may change from now on. -> its id; empty: there is no room for it

        pinned: it stays until it is removed; StoreFull if there is no room
        public: one that is stored already gets this owner, too
        """
        ids, frozen = torch.tensor(sequence.token_ids), sequence.cache.tracker.frozen
        *_, place = _places(sequence.config, ids, (*sequence.cuts, len(ids)), frozen)
        with self.lock:
            if known := self.by_place.get((PUBLIC if public else hashed(owner), place)):
                known.pinned |= pinned
                self.entries.move_to_end(known.id)
                self._set_owners(known, known.owners + Counter([hashed(owner)]))
                return known.id
            whole = sequence.history is not None
            size = self.histories.nbytes_of(len(ids)) if whole and self.histories else nbytes_of(sequence)
            if not (whole or self._make_room(size)):
                if pinned:
                    raise StoreFull(
                        f"this prefix takes {format_bytes(size)}, and of {format_bytes(self.max_bytes)} the rest is "
                        "pinned; remove others, or use a larger prefix_cache=."
                    )
                return ""
            made = self.new_id(), Counter([hashed(owner)]), public, place, size, pinned, text
            config = sequence.config
            kept = config.new_sequence() if whole else sequence
            entry = Entry(*made, sequence.cuts, sequence.token_ids, kept, config.method.name, config.budget, whole)
            self._insert(entry)
        self._save_later(entry)
        return entry.id

    def owned(self, owner: str, id: str) -> Entry:
        """Find an entry of this owner. KeyError: there is none"""
        if hashed(owner) not in (entry := self.entry(owner, id)).owners:
            raise KeyError(id)
        return entry

    def remove(self, owner: str, id: str, once: bool = False) -> None:
        """Take back an owner's claim, and drop what nobody has a claim to. KeyError: there is none of this owner.

        once: the claim stays where the owner pinned it more than once
        """
        with self.lock:
            entry, who = self.owned(owner, id), hashed(owner)
            owners = entry.owners - Counter({who: 1 if once else entry.owners[who]})
            if owners:
                self._set_owners(entry, owners)
            else:
                self._drop(entry)

    def _set_owners(self, entry: Entry, owners: Counter[str]) -> None:
        is_saved = owners.keys() == entry.owners.keys()
        entry.owners = owners
        if not is_saved:
            self._save_later(entry)

    def evict_oldest(self) -> bool:
        """Evict the least recently used. -> whether there was one that is not pinned"""
        with self.lock:
            oldest = next((entry for entry in self.entries.values() if not entry.pinned), None)
            if oldest:
                self._drop(oldest)
            return oldest is not None

    def _make_room(self, size: int) -> bool:
        pinned = sum(entry.nbytes for entry in self.entries.values() if entry.pinned and not entry.whole)
        if size + pinned > self.max_bytes:
            return False
        while self.nbytes + size > self.max_bytes:
            self.evict_oldest()
        return True

    def _insert(self, entry: Entry) -> None:
        older = self.by_place.get(entry.found_at)  # saved by another process
        if older and not older.pinned:
            self._drop(older)
        self.entries[entry.id] = self.by_place[entry.found_at] = entry
        self._pin(entry)

    def _pin(self, entry: Entry) -> None:
        if entry.whole and self.histories:
            self.histories.pin(entry.found_at[0], torch.tensor(entry.ids))

    def _drop(self, entry: Entry) -> None:
        del self.entries[entry.id]
        if self.by_place.get(entry.found_at) is entry:
            del self.by_place[entry.found_at]
        if entry.whole and self.histories:
            self.histories.unpin(entry.found_at[0], torch.tensor(entry.ids))
        if self.folder and entry.saved:
            shutil.rmtree(self.folder / entry.id, ignore_errors=True)

    def _copy(self, entry: Entry) -> Sequence | None:
        """Fork an entry. -> None: it could not be read from disk"""
        if not (sequence := self._load(entry)):
            return None
        self.entries.move_to_end(entry.id)
        return sequence.fork()

    # on disk

    def open(self, config: SequenceConfig, device_lock: AbstractContextManager[Any]) -> None:
        """Find what was saved with this model before; the newest that fit. Damaged ones are skipped.

        device_lock: held while tensors are copied to or from the device; a CUDA graph cannot be captured meanwhile.
        Always taken before the store's own.
        """
        self.config, self.device_lock = config, device_lock
        if not self.folder:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        found = sorted(self.folder.iterdir(), key=_modified)
        for draft in (each for each in found if DRAFT.fullmatch(each.name)):  # of a process that was killed meanwhile
            shutil.rmtree(draft, ignore_errors=True)
        for path in (each for each in found if ID.fullmatch(each.name)):  # nothing else here is ours
            try:
                if (entry := _described(path, config)) and (self.histories or not entry.whole):
                    self._insert(entry)
            except BadCacheFile as error:
                warnings.warn(f"a stored prefix is skipped: {error}", stacklevel=3)
        while self.nbytes > self.max_bytes and self.evict_oldest():
            pass

    def _saved_since(self, id: str) -> Entry:
        """Find what another process saved in the same folder; KeyError: there is nothing."""
        if self.folder and self.config and ID.fullmatch(id) and (self.folder / id).is_dir():
            with suppress(BadCacheFile), self.lock:
                entry = _described(self.folder / id, self.config)
                if entry and (self.histories if entry.whole else self._make_room(entry.nbytes)):
                    self.by_place.setdefault(entry.found_at, entry)
                    if (known := self.entries.setdefault(id, entry)) is entry:
                        self._pin(entry)
                    return known
        raise KeyError(id)

    def _load(self, entry: Entry) -> Sequence | None:
        """Load what is on disk alone; drop it if it is damaged. Others wait only while it is copied to the device."""
        if entry.sequence is None:
            assert self.folder is not None
            try:
                saved = checkpoint.read(self.folder / entry.id)
                with self.device_lock, self.lock:
                    entry.sequence = entry.sequence or self._sequence_of(entry, *saved)
                    if not entry.whole:
                        entry.nbytes = nbytes_of(entry.sequence)  # whatever the file says
            except BadCacheFile as error:
                warnings.warn(f"a stored prefix is skipped: {error}", stacklevel=2)
                with self.lock:
                    if entry.id in self.entries:
                        self._drop(entry)
        return entry.sequence

    def _sequence_of(self, entry: Entry, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Sequence:
        config = self.config
        assert self.folder is not None and config is not None
        if entry.whole:
            facts = {**facts, "seen": []}
        cache = serialize.restored(Cache, self.folder / entry.id, config.model, tensors, facts)
        cache.tokenizer = config.tokenizer
        sequence = config.sequence_of(cache, [] if entry.whole else list(entry.ids))
        sequence.cuts = entry.cuts
        if facts["prefix"]["frozen"]:
            cache.tracker.mark_context()
        return sequence

    def _save_later(self, entry: Entry) -> None:
        """Have a thread save it: nobody's answer waits for a disk."""
        can_save = entry.saved or (entry.sequence and serialize.can_save(entry.sequence.cache))
        if self.folder and can_save:
            self.writer.submit(self._try_to_write, entry.id)  # by id: one that is dropped meanwhile is not held

    def _try_to_write(self, id: str) -> None:
        try:
            if entry := self.entries.get(id):
                self._write(entry)
        except Exception as error:  # such as a full disk: it is in memory all the same
            self.num_unsaved += 1
            warnings.warn(f"a prefix could not be saved: {error}", stacklevel=1)

    def _write(self, entry: Entry) -> None:
        if not (sequence := self._load(entry)):  # its owners may have changed since a restart
            return
        assert self.folder is not None
        cache = sequence.cache
        about = {name: getattr(entry, name) for name in SAVED} | {"frozen": cache.tracker.frozen}
        about |= {"owners": list(entry.owners), "whole": entry.whole}
        with self.device_lock:
            tensors, facts = serialize.describe(cache, prefix=about)
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        facts |= {"seen": [len(entry.ids)]} if entry.whole else {}
        checkpoint.write(self.folder / entry.id, tensors, facts)
        with self.lock:
            entry.saved = True
            if entry.id not in self.entries:  # dropped meanwhile
                shutil.rmtree(self.folder / entry.id, ignore_errors=True)

    def flush(self) -> None:
        """Wait until all is saved."""
        self.writer.submit(int).result()  # the last one


def _described(path: Path, config: SequenceConfig) -> Entry | None:
    """What a folder says it holds; None: a cache of another model."""
    facts = checkpoint.read_facts(path)
    if facts.get("model") != serialize.fingerprint(config.model) or facts.get("dtype") != str(config.model.dtype):
        return None
    try:
        prefix = {"owners": [facts["prefix"].get("owner")], **facts["prefix"]}  # of older versions: one owner
        check_prefix(prefix, facts["seen"])
        found = {name: prefix[name] for name in SAVED}
        found |= {"owners": Counter(prefix["owners"]), "cuts": tuple(prefix["cuts"])}
        found |= {name: facts[name] for name in ("method", "budget")} | {"whole": bool(prefix.get("whole"))}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadCacheFile(f"{path} is not a stored prefix ({error!r}); remove it.") from error
    if found["id"] != path.name:
        raise BadCacheFile(f"{path} is of another name; remove it.")
    return Entry(**found, sequence=None, saved=True)


def _modified(path: Path) -> float:
    """The time a path was written last; 0 if it is gone by now. A link is not followed: it may lead nowhere."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _places(config: SequenceConfig, ids: Tensor, cuts: Iterable[int], frozen: bool = False) -> Iterator[str]:
    """A name for what is stored after each part: of these tokens, in these parts, by this method."""
    method, options = config.method, config.cache_options
    named = [method.name, sorted(method.parameters.items())] if serialize.is_named(method) else repr(method)
    facts = [named, method.schedule.every, config.budget, config.prefill_chunk_size, options.get("schedule"), frozen]
    digest = hashlib.sha256(json.dumps([*facts, options.get("storage")], default=repr).encode())
    for start, end in pairwise((0, *cuts)):
        digest.update(ids[start:end].numpy().tobytes() + b"|")
        yield digest.hexdigest()


def nbytes_of(sequence: Sequence) -> int:
    """Bytes of keys, values and what is known of them, on the device and offloaded; the most that any process has."""
    cache = sequence.cache
    held = cache.backend.report(cache.tracker.seen)
    others = [part for layer in cache.hf_layers for part in vars(layer).values() if isinstance(part, Tensor)]
    size = held.bytes + held.index_bytes + held.host_bytes + sum(part.nbytes for part in others)
    return -agree_on_least(cache.model, -size)
