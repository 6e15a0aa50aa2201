"""A cache on disk: a folder with the tensors (safetensors) and a description (json) that vouches for both."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from kvkeep.errors import BadCacheFile

TENSORS, DESCRIPTION, FORMAT = "cache.safetensors", "cache.json", "kvkeep-cache-1"


def write(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write both files beside the target and move them there in one step; an older cache at the path is replaced."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and {p.name for p in path.iterdir()} == {TENSORS, DESCRIPTION}):
        raise BadCacheFile(f"{path} exists and is not just a saved cache; choose another path, nothing was written.")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, draft / TENSORS)
        described = {"format": FORMAT, **facts, "tensors_sha256": _sha256(draft / TENSORS)}
        described["sha256"] = _checksum(described)
        (draft / DESCRIPTION).write_text(json.dumps(described, indent=1))
        _swap(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _swap(draft: Path, path: Path) -> None:
    """Put the new folder in the old one's place; the old one goes only when the new one is there."""
    old = draft.with_name(draft.name + "-old")
    if path.exists():
        os.replace(path, old)
    os.replace(draft, path)
    shutil.rmtree(old, ignore_errors=True)


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read both files, or say what is wrong with them."""
    path = Path(path)
    try:
        facts = json.loads((path / DESCRIPTION).read_text())
        stated = facts.pop("sha256")
    except FileNotFoundError as e:
        raise BadCacheFile(
            f"{path} is not a saved cache: it has no {DESCRIPTION}; save one with cache.save(path)."
        ) from e
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise BadCacheFile(f"{path / DESCRIPTION} is damaged ({e}); save the cache again.") from e
    if facts.get("format") != FORMAT:
        raise BadCacheFile(f"{path} has format {facts.get('format')!r}; this version reads {FORMAT}.")
    if _checksum(facts) != stated:
        raise BadCacheFile(f"{path / DESCRIPTION} was changed after it was written; save the cache again.")
    if not (path / TENSORS).is_file() or _sha256(path / TENSORS) != facts["tensors_sha256"]:
        raise BadCacheFile(
            f"{path / TENSORS} is missing, truncated or was changed after it was written; save the cache again."
        )
    return load_file(path / TENSORS), facts


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
