"""Who has these tokens already? One answer for conversations, prefixes and pinned texts.

With a history the host keeps keys and values of all tokens (engine/history_store.py). Without one, and for methods that
cannot go on after a history, compressed prefixes are kept on the device.

Their rule: a request that shares prefixes is prefilled in parts, each evicted from by itself, and what is stored
after a part is found by the tokens of all parts so far. Where parts end depends on the tokens before alone (`cuts_of`).
So a stored cache is the one that its tokens alone give: nothing later, and nobody else's, took part in the selection,
and an answer is the same whether a prefix was found or computed. Answers are not stored: they were decoded token by
token, and what is evicted after them depends on that. The next turn of a chat prefills the last answer with its own
message.

What that costs: no part knows the next question. So chats are cut at the ends of messages, their parts are compressed
by a method that needs no question unless a request names one, and the newest message stays whole. Long texts are cut
only if a request says so.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvkeep.cache import serialize
from kvkeep.cache.report import format_bytes
from kvkeep.engine import stored
from kvkeep.engine.history_store import PUBLIC, HistoryStore, hashed
from kvkeep.engine.prompts import cuts_of, end_of_message, newest_message
from kvkeep.engine.request import Request
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.engine.stored import ID, Lock, Place, Prefix, Text, name_of, names_of, nbytes_of
from kvkeep.errors import BadCacheFile, CacheMisuse, StoreFull
from kvkeep.model.hf_cache import context_length, layer_devices
from kvkeep.storage import checkpoint
from kvkeep.storage.history import BLOCK, History, HostPool

Change = Callable[[SequenceConfig], SequenceConfig]


class Store:
    """Finds where a prompt begins, and keeps texts until their owners remove them.

    Owners go on with what is their own, or public. The least recently used go first; texts stay.
    """

    def __init__(self, max_bytes: int = 0, folder: str | Path | None = None) -> None:
        """max_bytes: of compressed prefixes and texts; 0: it keeps neither, and no text in the history

        folder: where all is saved, to be found again after a restart, or by id by another process
        """
        self.max_bytes = max_bytes
        self.folder = None if folder is None else Path(folder)
        self.histories: HistoryStore | None = None
        self.entries: OrderedDict[str, Prefix] = OrderedDict()  # by id, the least recently used first
        self.by_place: dict[Place, Prefix] = {}
        self.lock = threading.RLock()
        self.device_lock: Lock = nullcontext()
        self.config: SequenceConfig | None = None
        self.writer = ThreadPoolExecutor(1, "kvkeep-store")
        self.num_unsaved = 0  # that could not be written
        self.new_id: Callable[[], str] = partial(secrets.token_urlsafe, 24)

    def open(self, config: SequenceConfig, device_lock: Lock, histories: HistoryStore | None) -> None:
        """Find what was saved with this model before; the newest that fit. Damaged ones are skipped.

        device_lock: held while tensors are copied to or from the device; a CUDA graph cannot be captured meanwhile.
        Always taken before the store's own.
        """
        if self.config is not None and self.config.model is not config.model:
            raise CacheMisuse("prefix_cache= is the store of an engine with another model; make one for each model.")
        self.config, self.device_lock, self.histories = config, device_lock, histories
        if not self.folder:
            return
        if histories is not None:
            histories.open(self.folder / "history", config.model, self.writer, device_lock)
        for path in stored.saved_in(self.folder):
            try:
                if found := stored.described(path, config, histories is not None):
                    self._insert(found)
            except BadCacheFile as error:
                warnings.warn(f"a stored prefix is skipped: {error}", stacklevel=3)
        while self.nbytes > self.max_bytes and self.evict_oldest():
            pass

    @property
    def nbytes(self) -> int:
        """Bytes of compressed keys, values and what is known of them; those on disk alone included."""
        return sum(each.own_bytes for each in list(self.entries.values()))

    # where prompts begin

    def histories_for(self, config: SequenceConfig, ids: Tensor) -> HistoryStore | None:
        """Where the host keeps all of a sequence, for others to go on with; None: it does not.

        Retrieval methods do so by themselves. A method that scores a token only once would miss its score in a history.
        """
        method = config.method
        too_long = method.extends_context and len(ids) > context_length(config.model)
        return None if method.retrieval or method.scores_own_tokens or too_long else self.histories

    def share(self, request: Request, cache_prefix: bool | None, is_chat: bool, agnostic: Change | None) -> None:
        """Have a request begin after what is stored of its prompt; without a history, cut that into parts for it.

        agnostic: gives the same with a method that needs no question; None: the request names its method
        """
        shared = cache_prefix or (cache_prefix is None and is_chat)
        newest = newest_message(request.config, request.ids) if is_chat else 0
        if shared and (histories := self.histories_for(request.config, request.ids)):
            histories.prepare(request.owner, request.ids)
            request.find_stored = partial(histories.begin, request.owner, request.config, request.ids, newest)
        elif shared and (cache_prefix or self.max_bytes):
            retrieval = request.config.method.retrieval
            asked = request.question is not None and retrieval and "question" in retrieval.index.needs
            request.cuts = () if asked else cuts_of(request.ids, end_of_message(request.config), bool(cache_prefix))
            if is_chat and agnostic and not retrieval:  # no question is known of what is stored
                request.cuts = tuple(cut for cut in request.cuts if cut <= newest)
                if request.cuts:
                    request.whole_end, request.config = True, agnostic(request.config)
            if self.max_bytes and request.cuts:
                which = request.owner, request.config, request.ids, request.cuts
                if self.folder:
                    self._find(*which)  # steps wait for no disk
                request.find_stored = partial(self.longest, *which)

    def begin_alone(self, request: Request) -> None:
        """Have an exact answer begin with a history that is for no other request, if it has none yet."""
        needs_history = request.how.exact and not request.config.is_exact
        if needs_history and request.find_stored is None and self.histories is not None:
            request.find_stored = partial(self.histories.begin, request.owner, request.config, request.ids)
            request.shares_history = False

    def empty_history(self, tokens: int) -> History:
        """One that so many tokens will be added to; they stay on the device where the host has no room."""
        histories, config = self.histories, self.config
        assert config is not None
        made = History(histories.pool if histories else HostPool(config.device, devices=layer_devices(config.model)))
        made.makes_blocks = histories is None or histories.make_room(tokens // BLOCK)
        return made

    # compressed prefixes

    def longest(self, owner: str, config: SequenceConfig, ids: Tensor, cuts: Seq[int]) -> Sequence | None:
        """A copy of the one that has seen most of these ids, in parts that end at these cuts."""
        with self.device_lock, self.lock:
            if not (prefix := self._find(owner, config, ids, cuts)) or not prefix.sequence:
                return None
            self.entries.move_to_end(prefix.id)
            found = prefix.sequence.fork()
            found.config = config
            return found

    def _find(self, owner: str, config: SequenceConfig, ids: Tensor, cuts: Seq[int]) -> Prefix | None:
        """Find the longest one, and load it."""
        for name in reversed(list(names_of(config, ids, cuts))):
            prefix = self.by_place.get((hashed(owner), name))
            if prefix and self._load(prefix):
                return prefix
        return None

    def add(self, owner: str, sequence: Sequence) -> None:
        """Store a compressed prefix, if there is room. sequence: nobody else may change it from now on"""
        place = hashed(owner), name_of(sequence)
        with self.lock:
            if known := self.by_place.get(place):
                self.entries.move_to_end(known.id)
            elif self._make_room(size := nbytes_of(sequence)):
                self._add(Prefix(self.new_id(), place, sequence.token_ids, sequence.cuts, size, sequence))

    def evict_oldest(self) -> bool:
        """Evict the least recently used prefix. -> whether there was one"""
        with self.lock:
            oldest = next((each for each in self.entries.values() if not isinstance(each, Text)), None)
            if oldest:
                self._drop(oldest)
            return oldest is not None

    def _make_room(self, size: int) -> bool:
        if size + sum(each.own_bytes for each in self.entries.values() if isinstance(each, Text)) > self.max_bytes:
            return False
        while self.nbytes + size > self.max_bytes:
            self.evict_oldest()
        return True

    # pinned texts

    def pin(self, owner: str, text: str, public: bool, sequence: Sequence) -> str:
        """Keep a text until its owner removes it. -> its id; StoreFull: there is no room

        public: one that is stored already gets this owner, too; sequence: nobody else may change it from now on
        """
        config, ids, who = sequence.config, sequence.token_ids, hashed(owner)
        if sequence.history is None:
            sequence.cache.tracker.mark_context()
        elif self.histories:
            self.histories.add(owner, torch.tensor(ids), sequence.history, public)
        place, cuts = (PUBLIC if public else who, name_of(sequence)), sequence.cuts
        with self.lock:
            if isinstance(known := self.by_place.get(place), Text):
                self._set_owners(known, known.owners + Counter([who]))
                return known.id
            if sequence.history is not None and self.histories:
                size, sequence = len(ids) // BLOCK * self.histories.block_bytes, config.new_sequence()
            elif not self._make_room(size := nbytes_of(sequence)):
                raise StoreFull(
                    f"this prefix takes {format_bytes(size)}, and of {format_bytes(self.max_bytes)} the rest is "
                    "pinned; remove others, or use a larger prefix_cache=."
                )
            made = self.new_id(), place, ids, cuts, size, sequence
            self._add(new := Text(*made, Counter([who]), text, config.method.name, config.budget))
            return new.id

    def text(self, owner: str, id: str, own: bool = False) -> Text:
        """Find a text of this owner, or a public one unless it has to be its own. KeyError: there is none"""
        found = self.entries.get(id) or self._saved_since(id)
        if isinstance(found, Text) and (hashed(owner) in found.owners or (found.public and not own)):
            return found
        raise KeyError(id)

    def pinned_by(self, owner: str) -> list[Text]:
        """The texts that this owner has a claim to."""
        return [each for each in list(self.entries.values()) if isinstance(each, Text) and hashed(owner) in each.owners]

    def loaded(self, owner: str, id: str) -> tuple[Text, Sequence]:
        """Find a text as `text` does, with its sequence."""
        text = self.text(owner, id)
        if not (sequence := self._load(text)):
            raise KeyError(id)
        return text, sequence

    def after_text(self, owner: str, id: str, config: SequenceConfig, ids: Tensor) -> Sequence:
        """A sequence that goes on after a text. ids: of the text and a question. KeyError: it is gone"""
        with self.device_lock, self.lock:
            text, sequence = self.loaded(owner, id)
            if not (text.in_history and self.histories):
                return sequence.fork()
        return self.histories.begin(owner, config, ids, len(text.ids), asks=True)

    def remove(self, owner: str, id: str, once: bool = False) -> None:
        """Take back an owner's claim, and drop what nobody has a claim to. KeyError: there is none of this owner.

        once: the claim stays where the owner pinned it more than once
        """
        with self.lock:
            found, who = self.text(owner, id, own=True), hashed(owner)
            owners = found.owners - Counter({who: 1 if once else found.owners[who]})
            if owners:
                self._set_owners(found, owners)
            else:
                self._drop(found)

    def _set_owners(self, text: Text, owners: Counter[str]) -> None:
        before, text.owners = text.owners, owners
        if owners.keys() != before.keys():
            self._save_later(text.id)

    # both of them, in memory and on disk

    def _add(self, new: Prefix) -> None:
        self._insert(new)
        self._save_later(new.id)

    def _insert(self, new: Prefix) -> None:
        older = self.by_place.get(new.place)  # saved by another process
        if older and not isinstance(older, Text):
            self._drop(older)
        self.entries[new.id] = new
        self.by_place.setdefault(new.place, new)
        if new.in_history and self.histories:
            self.histories.pin(new.place[0], torch.tensor(new.ids))

    def _drop(self, found: Prefix) -> None:
        del self.entries[found.id]
        if self.by_place.get(found.place) is found:
            del self.by_place[found.place]
        if found.in_history and self.histories:
            self.histories.unpin(found.place[0], torch.tensor(found.ids))
        if self.folder:
            shutil.rmtree(self.folder / found.id, ignore_errors=True)

    def _saved_since(self, id: str) -> Prefix | None:
        """Find what another process saved in the same folder."""
        if self.folder and self.config and ID.fullmatch(id):
            with suppress(BadCacheFile), self.lock:
                found = stored.described(self.folder / id, self.config, self.histories is not None)
                if found and id not in self.entries and (found.in_history or self._make_room(found.nbytes)):
                    self._insert(found)
        return self.entries.get(id)

    def _load(self, prefix: Prefix) -> Sequence | None:
        """Load what is on disk alone; drop it if it is damaged. Others wait only while it is copied to the device."""
        if prefix.sequence is None:
            assert self.folder is not None and self.config is not None
            try:
                saved, path = checkpoint.read(self.folder / prefix.id), self.folder / prefix.id
                with self.device_lock, self.lock:
                    prefix.sequence = prefix.sequence or stored.restored(path, prefix, self.config, saved)
                    prefix.nbytes = nbytes_of(prefix.sequence)  # whatever the file says
            except BadCacheFile as error:
                warnings.warn(f"a stored prefix is skipped: {error}", stacklevel=2)
                with self.lock:
                    if prefix.id in self.entries:
                        self._drop(prefix)
        return prefix.sequence

    def _save_later(self, id: str) -> None:
        """Have a thread save it: nobody's answer waits for a disk."""
        if self.folder:
            self.writer.submit(self._try_to_save, id)  # by id: one that is dropped meanwhile is not held

    def _try_to_save(self, id: str) -> None:
        assert self.folder is not None
        try:
            found = self.entries.get(id)
            if found and (sequence := self._load(found)) and serialize.can_save(sequence.cache):
                stored.write(self.folder / id, found, sequence.cache, self.device_lock)
                with self.lock:
                    if id not in self.entries:  # dropped meanwhile
                        shutil.rmtree(self.folder / id, ignore_errors=True)
        except Exception as error:  # such as a full disk: it is in memory all the same
            self.num_unsaved += 1
            warnings.warn(f"a prefix could not be saved: {error}", stacklevel=1)

    def flush(self) -> None:
        """Wait until all is saved."""
        self.writer.submit(int).result()  # the last one
