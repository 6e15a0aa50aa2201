"""LongBench (arXiv:2308.14508): 21 tasks, from the official files or from prompts that are filled in already.

longbench.json holds the official templates, cut where the context ends, and limits (THUDM/LongBench, MIT).
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.build import fill, identity, samples, text, texts
from kvkeep.registry import did_you_mean

TEMPLATES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CHINESE = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
ENGLISH = [task for task in TEMPLATES if task not in CHINESE]  # the 16 that papers on KV caches report
LONGBENCH_E = [task for task in ENGLISH if task not in {"narrativeqa", "musique", "qmsum"}]
WITHOUT_CHAT = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
LIMITS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}  # the authors': 1000 tokens to a K
MARGIN = 500  # of any other context length, left free
NEEDS_CLASSES = {"trec", "lsht"}


def longbench(path: str | Path) -> list[Sample]:
    """Lines with `answers`, and `context` and `input` or a filled-in `prompt`; all are asked in the official words.

    The task is the line's `dataset`, or the file's name; a name that ends in _e is LongBench-E.
    """
    return samples(path, partial(_sample, stem=Path(path).stem))


def _sample(record: dict[str, Any], where: str, number: int, stem: str) -> Sample:
    given = str(record.get("dataset") or stem)
    name = given.removesuffix("_e")
    if name not in TEMPLATES:
        raise BadInput(f"{where}: no LongBench task is called '{name}'.{did_you_mean(name, TEMPLATES)}")
    template = TEMPLATES[name]
    fields = _fields(record, where, name)
    by_length = f"{name}_e" in (given, stem)
    return Sample(
        f"{name}_e" if by_length else name,
        identity(record, number, "_id", "idx"),
        fill(template["question"], fields),
        texts(record, where, "answers"),
        "longbench",
        context=fill(template["context"], fields),
        max_new_tokens=template["max_new_tokens"],
        chat=name not in WITHOUT_CHAT,
        stops=("\n",) if name == "samsum" else (),
        non_empty=name == "samsum",
        margin=MARGIN,
        limits=LIMITS,
        extra=_extra(record, where, name, by_length),
    )


def _extra(record: dict[str, Any], where: str, name: str, by_length: bool) -> dict[str, Any]:
    """What the score needs beside the answer; the length in words says the range in LongBench-E."""
    extra: dict[str, Any] = {"dataset": name}
    if name in NEEDS_CLASSES:
        extra["all_classes"] = texts(record, where, "all_classes")
    if isinstance(record.get("length"), int):
        extra["length"] = record["length"]
    elif by_length:
        raise BadInput(f"{where} has no length in words, and LongBench-E is reported by length.")
    return extra


def _fields(record: dict[str, Any], where: str, name: str) -> dict[str, str]:
    """context and input: given, or found again in a prompt."""
    if "context" not in record and "prompt" in record:
        prompt = text(record, where, "prompt")
        for wording in _wordings(name):
            if found := _unfilled(prompt, wording, TEMPLATES[name].get("input_starts", "")):
                return found
        raise BadInput(f"{where}: the prompt is not in the words of '{name}'; give its context and input instead.")
    wanted = "{input}" in TEMPLATES[name]["question"]
    return {"context": text(record, where, "context"), "input": text(record, where, "input") if wanted else ""}


def _wordings(name: str) -> list[str]:
    """The official one, and the three OpenCompass changed: the files of MiniLongBench are in its words."""
    official = {task: template["context"] + template["question"] for task, template in TEMPLATES.items()}
    changed = {
        "narrativeqa": official["narrativeqa"].replace("asconcisely", "as concisely"),
        "qasper": official["hotpotqa"],
        "multi_news": official["multi_news"] + "\n",
    }
    return [official[name], changed.get(name, official[name])]


def _unfilled(prompt: str, wording: str, input_starts: str) -> dict[str, str] | None:
    """The fields of a filled template, None where it is another's.

    Examples look like the last question, which is told by how it starts. Nothing stands between the two fields of
    repobench-p, so all of its code counts as context.
    """
    head, rest = wording.split("{context}")
    middle, _, tail = rest.rpartition("{input}")
    if not (prompt.startswith(head) and prompt.endswith(tail) and len(prompt) > len(head) + len(tail)):
        return None
    body = prompt[len(head) : len(prompt) - len(tail)]
    if "{input}" not in rest:
        return {"context": body, "input": ""}
    end = body.rfind(middle + input_starts)
    return {"context": body[:end], "input": body[end + len(middle) :]} if end >= 0 else None
