"""A cache on disk: a folder with the tensors (safetensors) and a description (json) with checksums of both."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvkeep.arguments import check_value
from kvkeep.errors import BadCacheFile

TENSORS, DESCRIPTION, FORMAT = "cache.safetensors", "cache.json", "kvkeep-cache-1"


def write(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write both files beside the target and move them there atomically; an older cache at the path is replaced.

    Of a symbolic link the target is replaced. Whatever fails, an older cache stays where it is.
    """
    check_value("path", path, str | os.PathLike)
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not _is_cache(target):
            raise BadCacheFile(f"{path} exists and is not just a saved cache; choose another, nothing was written.")
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _draft(draft, tensors, facts)
            _swap(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, SafetensorError) as e:
        raise BadCacheFile(
            f"{path} cannot be written ({e}); what was there before is untouched: make room, or choose another path."
        ) from e


def _is_cache(path: Path) -> bool:
    return path.is_dir() and {p.name for p in path.iterdir()} == {TENSORS, DESCRIPTION}


def _draft(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    save_file(_unshared(tensors), folder / TENSORS)
    described = {"format": FORMAT, **facts, "tensors_sha256": _sha256(folder / TENSORS)}
    described["sha256"] = _checksum(described)
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=1))


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each in memory of its own, as safetensors requires; repeated rows share theirs."""
    unshared: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        memory = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if memory in used else tensor
        used.add(memory)
    return unshared


def _swap(draft: Path, target: Path) -> None:
    """Replace the old folder by the new one, atomically where the system can; afterwards `draft` is the old."""
    if not target.exists():
        os.replace(draft, target)
    elif not _exchange(draft, target):
        old = draft.with_name(draft.name + "-old")
        os.replace(target, old)
        try:
            os.replace(draft, target)
        except BaseException:
            os.replace(old, target)
            raise
        os.replace(old, draft)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders so that neither is ever missing, which only Linux can. -> whether it did"""
    try:
        call = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call(cwd, os.fsencode(one), cwd, os.fsencode(other), exchange) == 0


def read_facts(path: str | Path) -> dict[str, Any]:
    """Read the description alone; BadCacheFile says what is wrong with it."""
    check_value("path", path, str | os.PathLike)
    path = Path(path)
    try:
        facts = json.loads(_regular(path / DESCRIPTION).read_text())
        stated, checksum = facts.pop("sha256"), _checksum(facts)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise BadCacheFile(
            f"{path} is not a saved cache: it has no {DESCRIPTION}; save one with cache.save(path)."
        ) from e
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OSError) as e:
        raise BadCacheFile(f"{path / DESCRIPTION} is damaged ({e}); save the cache again.") from e
    if facts.get("format") != FORMAT:
        raise BadCacheFile(f"{path} has format {facts.get('format')!r}; this version reads {FORMAT}.")
    if checksum != stated:
        raise BadCacheFile(f"{path / DESCRIPTION} was changed after it was written; save the cache again.")
    return facts


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read both files; BadCacheFile says what is wrong with them."""
    facts = read_facts(path)
    path = Path(path)
    try:
        if _sha256(path / TENSORS) == facts.get("tensors_sha256"):
            return load_file(path / TENSORS), facts
        problem = "it is not the one that was written"
    except (OSError, SafetensorError) as e:
        problem = str(e)
    raise BadCacheFile(
        f"{path / TENSORS} is missing, truncated or was changed after it was written ({problem}); save the cache again."
    )


def _regular(path: Path) -> Path:
    """Refuse what a reader may wait for without end: a pipe, a socket or a device."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a regular file")
    return path


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with _regular(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
