"""What a store keeps, in memory and in folders: prefixes of prompts, and texts that are pinned."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import serialize
from kvkeep.cache.cache import Cache
from kvkeep.cache.validate import check_stored
from kvkeep.engine.history_store import PUBLIC
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadCacheFile
from kvkeep.model.head_shards import agree_on_least
from kvkeep.storage import checkpoint

ID, DRAFT = re.compile(r"[\w-]{32}"), re.compile(r"\.[\w-]{32}-\w{8}(-old)?")  # names of folders, of our making
Place = tuple[str, str]  # who finds it: a hashed owner, or PUBLIC; the hash of its tokens, parts, method and budget
Lock = AbstractContextManager[Any]
Saved = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and what is said about them


@dataclass(eq=False)
class Prefix:
    """What prompts begin with: a compressed cache, or an empty one where the history has it all."""

    id: str
    place: Place
    ids: list[int]
    cuts: tuple[int, ...]
    nbytes: int
    sequence: Sequence | None  # None: it is on disk until somebody asks for it

    @property
    def in_history(self) -> bool:
        return self.sequence is not None and not self.sequence.token_ids

    @property
    def own_bytes(self) -> int:
        """Bytes of its compressed cache."""
        return 0 if self.in_history else self.nbytes


@dataclass(eq=False)
class Text(Prefix):
    """A text that its owners have pinned."""

    owners: Counter[str]  # how often each owner pinned it, by hash; one owner, unless it is public
    text: str
    method: str
    budget: int | float | None

    @property
    def public(self) -> bool:
        """Whether all find it; it is dropped when its last owner removes it."""
        return self.place[0] == PUBLIC


def saved_in(folder: Path) -> list[Path]:
    """Remove what a process that was killed had begun to write. -> folders of what was written, the oldest first"""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.iterdir(), key=_modified)
    for draft in (each for each in found if DRAFT.fullmatch(each.name)):
        shutil.rmtree(draft, ignore_errors=True)
    return [each for each in found if ID.fullmatch(each.name)]  # nothing else here is ours


def described(path: Path, config: SequenceConfig, has_history: bool) -> Prefix | None:
    """What a folder says it holds. -> None: it is of another model, or in a history where there is none"""
    facts = checkpoint.read_facts(path)
    if facts.get("model") != serialize.fingerprint(config.model) or facts.get("dtype") != str(config.model.dtype):
        return None
    try:
        about = {"owners": [facts["prefix"].get("owner")], **facts["prefix"]}  # of older versions: one owner
        check_stored(about, facts["seen"], path.name)
        place = PUBLIC if about["public"] else about["owners"][0], about["place"]
        made = path.name, place, about["ids"], tuple(about["cuts"]), about["nbytes"], None
        said = Counter(about["owners"]), about["text"], facts["method"], facts["budget"]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadCacheFile(f"{path} is not a stored prefix ({error!r}); remove it.") from error
    found = Text(*made, *said) if about["pinned"] else Prefix(*made)
    if about.get("whole"):
        found.sequence = restored(path, found, config, checkpoint.read(path)) if has_history else None
        return found if has_history else None
    return found


def restored(path: Path, prefix: Prefix, config: SequenceConfig, saved: Saved) -> Sequence:
    """Make the sequence that was read from a folder."""
    tensors, facts = saved
    whole = facts["prefix"].get("whole")
    facts |= {"seen": []} if whole else {}
    cache = serialize.restored(Cache, path, config.model, tensors, facts)
    cache.tokenizer = config.tokenizer
    sequence = config.sequence_of(cache, [] if whole else list(prefix.ids))
    sequence.cuts = prefix.cuts
    if facts["prefix"]["frozen"]:
        cache.tracker.mark_context()
    return sequence


def write(path: Path, prefix: Prefix, cache: Cache, lock: Lock) -> None:
    """Write a prefix or a text, and its cache. lock: held while tensors are copied"""
    who, place = prefix.place
    about = {name: getattr(prefix, name) for name in ("id", "nbytes", "cuts", "ids")} | {"public": who == PUBLIC}
    about |= {"owners": [who], "place": place, "pinned": False, "text": "", "whole": prefix.in_history}
    if isinstance(prefix, Text):
        about |= {"owners": list(prefix.owners), "pinned": True, "text": prefix.text}
    with lock:
        tensors, facts = serialize.describe(cache, prefix=about | {"frozen": cache.tracker.frozen})
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    checkpoint.write(path, tensors, facts | {"seen": [len(prefix.ids)]})


def nbytes_of(sequence: Sequence) -> int:
    """Bytes of keys, values and what is known of them, on the device and offloaded; the most that any process has."""
    cache = sequence.cache
    held = cache.backend.report(cache.tracker.seen)
    others = [part for layer in cache.hf_layers for part in vars(layer).values() if isinstance(part, Tensor)]
    size = held.bytes + held.index_bytes + held.host_bytes + sum(part.nbytes for part in others)
    return -agree_on_least(cache.model, -size)


def names_of(config: SequenceConfig, ids: Tensor, cuts: Iterable[int], frozen: bool = False) -> Iterator[str]:
    """A name for what is stored after each part: of these tokens, in these parts, by this method."""
    method, options = config.method, config.cache_options
    named = [method.name, sorted(method.parameters.items())] if serialize.is_named(method) else repr(method)
    facts = [named, method.schedule.every, config.budget, config.prefill_chunk_size, options.get("schedule"), frozen]
    digest = hashlib.sha256(json.dumps([*facts, options.get("storage")], default=repr).encode())
    for start, end in pairwise((0, *cuts)):
        digest.update(ids[start:end].numpy().tobytes() + b"|")
        yield digest.hexdigest()


def name_of(sequence: Sequence) -> str:
    """Name what a sequence has seen, in its parts."""
    ids = torch.tensor(sequence.token_ids)
    *_, name = names_of(sequence.config, ids, (*sequence.cuts, len(ids)), sequence.cache.tracker.frozen)
    return name


def _modified(path: Path) -> float:
    """The time a path was written last; 0 if it is gone by now. A link is not followed: it may lead nowhere."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
