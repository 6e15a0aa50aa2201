"""Datasets of the Hugging Face hub, downloaded once into JSON lines; evaluation works offline from then on."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvkeep.errors import BadInput, MissingExtra, UnknownName
from kvkeep.evaluate.tasks import infinitebench, longbench
from kvkeep.model.default_model import default_folder
from kvkeep.registry import did_you_mean


@dataclass(frozen=True)
class Source:
    """A dataset of the hub: one split, or one file as it is (`member`: out of an archive)."""

    repo: str
    config: str | None = None
    split: str = ""
    file: str = ""
    member: str = ""


# LongBench is a script, which `datasets` no longer runs, beside an archive; the columns of InfiniteBench's tasks
# differ too much for one table. The files of both are in the format of tasks/.
LONGBENCH = [*longbench.TEMPLATES, *(f"{task}_e" for task in longbench.LONGBENCH_E)]
INFINITE = "xinrongzhang2022/InfiniteBench"
SOURCES = {
    **{f"longbench/{t}": Source("zai-org/LongBench", file="data.zip", member=f"data/{t}.jsonl") for t in LONGBENCH},
    **{f"infinitebench/{t}": Source(INFINITE, file=f"{t}.jsonl") for t in infinitebench.TEMPLATES},
    "short/arc_easy": Source("allenai/ai2_arc", "ARC-Easy", "test"),  # the splits lm-eval uses
    "short/openbookqa": Source("allenai/openbookqa", "main", "test"),
    "short/wic": Source("aps/super_glue", "wic", "validation"),
    "short/winogrande": Source("allenai/winogrande", "winogrande_xl", "validation"),
    "math500": Source("HuggingFaceH4/MATH-500", split="test"),
    "aime24": Source("HuggingFaceH4/aime_2024", split="train"),
    "aime25": Source("math-ai/aime25", split="test"),
}


def data_folder() -> Path:
    """The folder of downloaded data: beside the models."""
    return default_folder().parents[1] / "data"


def why_unavailable(name: str) -> str:
    """Why a task cannot be downloaded: no source, or a package that is not installed; "" otherwise."""
    place = name if name in SOURCES else f"short/{name}"
    source = SOURCES.get(place)
    if source is None:  # a file of a folder: `fetch` knows those that are there
        return "" if "/" in name else f"has no dataset on the hub; give a folder with {name}.jsonl: --data DIR"
    if source.file or (data_folder() / f"{place}.jsonl").is_file() or find_spec("datasets"):
        return ""
    return f"is read from {source.repo} with `datasets`, which is missing (pip install 'kvkeep[eval]')"


def fetch(name: str, folder: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """A task's file ("longbench/qasper", "wic"), downloaded on first use. It appears whole or not at all."""
    place = name if name in SOURCES else f"short/{name}"
    if place not in SOURCES:
        raise UnknownName(f"no task '{name}' is on the hub.{did_you_mean(name, SOURCES)} Known: {', '.join(SOURCES)}.")
    source, target = SOURCES[place], (folder or data_folder()) / f"{place}.jsonl"
    if target.is_file():
        return target
    if say:
        say(f"fetching {name} from {source.repo} (once)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as scratch:
            os.replace(_save(source, Path(scratch) / target.name), target)
    except MissingExtra:
        raise
    except Exception as error:  # whatever the hub, the network and the libraries between raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(
            f"'{name}' could not be fetched from the dataset {source.repo} ({reason}); check the network, or give a "
            "folder with the official files: --data DIR."
        ) from error
    return target


def _save(source: Source, path: Path) -> Path:
    if not source.file:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise MissingExtra(f"{source.repo} is read with `datasets`: pip install 'kvkeep[eval]'") from error
        rows = load_dataset(source.repo, source.config, split=source.split)
        with path.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return path
    from huggingface_hub import hf_hub_download  # comes with transformers

    file = hf_hub_download(source.repo, source.file, repo_type="dataset")
    if source.member:
        with zipfile.ZipFile(file) as archive, archive.open(source.member) as inside, path.open("wb") as out:
            shutil.copyfileobj(inside, out)
        return path
    return Path(shutil.copyfile(file, path))
