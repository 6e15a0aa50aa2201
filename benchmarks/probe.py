"""Which probe ranks far chunks as attention does: python benchmarks/probe.py --texts DIR [--variants] [--out FILE]

DIR holds plain-text prose (*.txt), at least one file of --length tokens per sample. ActQKV's setting: windows of 256
queries, 64 sinks, 512 near tokens, chunks of 32 tokens that all represent it (--representatives 4: the paper's number).
The model prefills each text whole; the attention a chunk gets is compared with the score of a probe made of the same
queries. Printed as Markdown.

sum: attention of all queries of the window, averaged over heads; peak: of the query that gave the chunk most.
hits: share of the oracle's best 16 chunks that are retrieved: 46 of more, or a quarter of all (never more than 46).
Windows of one text are not independent: the intervals are narrower than those of other texts would be.

Deviation: the paper's table 7 (0.73 for activation bias, 0.54 for the mean) ranks by BGE-M3 embeddings, not by
attention: a block scores its best cosine with any query token. `most like` is that rule with the model's own vectors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

import kvkeep
from kvkeep.compress.method import Method
from kvkeep.compress.retrieval.index import OffloadedTokens, Representatives
from kvkeep.kernels.torch.reference import causal_lower_right, probabilities
from kvkeep.kernels.torch.retrieval_units import Moments, activation_bias, concat_heads
from kvkeep.model.load import load, quiet_transformers
from kvkeep.model.rope import Rotation, rotations
from kvkeep.types import Observation

WINDOW, SINKS, NEAR, CHUNK = 256, 64, 512, 32
RETRIEVED, BEST = 46, 16  # chunks a budget of 2,048 has room for; chunks of the oracle that should be among them
ORACLES = ("sum", "peak", "most like")
MEASURES = ("ρ", "hits in a quarter", f"hits in {RETRIEVED}")


@dataclass(frozen=True)
class Window:
    """What a probe can be made of: heads concatenated, rotated to the near window's edge."""

    queries: Tensor  # [w, dim]
    history: Tensor  # [n, dim] all queries so far, these included
    moments: Moments  # of them
    kv_heads: int

    def weighted(self, weight: Tensor) -> Tensor:
        return weight / weight.sum() @ self.queries

    def surprise(self) -> Tensor:
        """Activation bias per number: 1 on average over the text. [w]"""
        return ((self.queries - self.moments.mean).square() / self.moments.variance).mean(1)


Probe = Callable[[Window], Tensor]

PROBES: dict[str, Probe] = {
    "activation bias": lambda w: activation_bias(w.queries, w.moments),
    "mean": lambda w: w.queries.mean(0),
    "last query": lambda w: w.queries[-1],
}
DOT: dict[str, Probe] = {"mean, dot (infllm)": PROBES["mean"], "activation bias, dot": PROBES["activation bias"]}
REFERENCES = ("the later, the better", "attention of the 512 queries before")  # no probe at all


def regularised(w: Window) -> Tensor:
    """As the authors' code does."""
    variance = w.moments.variance
    return activation_bias(w.queries, replace(w.moments, variance=variance + 0.01 * variance.mean()))


def before(w: Window) -> Tensor:
    return activation_bias(w.queries, Moments.of(w.history[: -len(w.queries)]))


def of_directions(w: Window) -> Tensor:
    """Surprise of a query's direction; its length counts in the sum only."""
    directions = normalize(w.history, dim=1)
    moments = Moments.of(directions)
    ours = directions[-len(w.queries) :]
    return w.weighted(((ours - moments.mean).square() / moments.variance).sum(1))


def per_head(w: Window) -> Tensor:
    parts = [part.chunk(w.kv_heads, -1) for part in (w.queries, w.moments.mean, w.moments.variance)]
    heads = zip(*parts, strict=True)
    return torch.cat([activation_bias(q, Moments(w.moments.count, mean, var)) for q, mean, var in heads])


def top_tenth(w: Window) -> Tensor:
    surprise = w.surprise()
    return w.queries[surprise.topk(len(surprise) // 10).indices].mean(0)


VARIANTS: dict[str, Probe] = {
    "bias, variance + 1 % of its mean": regularised,
    "bias, moments before the window": before,
    "bias, moments of directions": of_directions,
    "bias, per KV head": per_head,
    "bias, squared": lambda w: w.weighted(w.surprise().square()),
    "bias, softmax": lambda w: w.weighted(w.surprise().softmax(0)),
    "bias, softmax of the sum": lambda w: w.weighted((w.surprise() * w.queries.shape[1]).softmax(0)),
    "bias, only the top tenth": top_tenth,
    "bias, of deviations": lambda w: PROBES["activation bias"](w) - w.moments.mean,
    "reversed bias": lambda w: w.weighted(1 / w.surprise()),
    "mean of directions": lambda w: normalize(w.queries, dim=1).mean(0),
    "mean of deviations": lambda w: w.queries.mean(0) - w.moments.mean,
    "mean of all queries so far": lambda w: w.moments.mean,
}


def watch(look: Callable[[Observation], Tensor], model, ids: Tensor) -> Tensor:
    """`look` of every layer's observation, stacked."""
    looks = []

    def spy(seen: Observation, budget: int) -> Tensor:
        looks.append(look(seen))
        return torch.zeros(seen.keys.shape[:2], device=seen.keys.device)

    cache = kvkeep.Cache(model, Method("spy", spy, observation_window=ids.shape[-1]), 1)
    model(ids[None].to(model.device), past_key_values=cache, logits_to_keep=1)
    return torch.stack(looks)


def attention(seen: Observation) -> Tensor:
    """As the model computed it, averaged over heads. [n, n]"""
    n = seen.tokens
    mean = torch.zeros(n, n, device=seen.keys.device)
    for start in range(0, n, WINDOW):
        end = min(n, start + WINDOW)
        allowed = causal_lower_right(end - start, end - start, mean.device)[None]
        queries, keys = seen.queries[:, start:end], seen.keys[:, :end]
        chances = probabilities(queries, keys, allowed, seen.scale, seen.softcap, seen.sink_logits)
        mean[start:end, :end] = chances.mean((0, 1))
    return mean


@dataclass(frozen=True)
class Far:
    """What a window can retrieve: chunks of the tokens behind its near ones."""

    start: int  # of the window
    away: slice  # the tokens
    count: int  # of chunks
    likes: Tensor  # [count, dim] for cosines with a probe
    dots: Tensor  # [count, dim] for products with it


def windows(
    seen: Observation, turn: Rotation | None, first: int, speak: int, given: Tensor
) -> Iterator[tuple[Window, Far]]:
    """Every window of queries of a layer from `first` on, as ActQKV reads the text. given: its attention [n, n]"""
    n, places = seen.tokens, seen.token_positions[0]
    queries = concat_heads(turn.rotate(seen.queries, NEAR - places) if turn else seen.queries, seen.kv_heads)
    keys = turn.rotate(seen.keys, -places) if turn else seen.keys
    mass = given.tril(-1).triu(-NEAR).sum(0)  # from the queries close behind, as the engine counts it
    moments = None
    for start in range(0, n - n % WINDOW, WINDOW):
        here = slice(start, start + WINDOW)
        mine = Moments.of(queries[here])
        moments = moments.merge(mine) if moments else mine
        if start < first:
            continue
        count = (start - NEAR - SINKS) // CHUNK
        away = slice(SINKS, SINKS + count * CHUNK)
        member = torch.arange(count, device=keys.device).repeat_interleave(CHUNK)
        leaving = OffloadedTokens(keys[:, away], mass[away], member[None], count)
        likes, dots = (Representatives(speak, cosine).build(leaving)[0] for cosine in (True, False))
        window = Window(queries[here], queries[: here.stop], moments, seen.kv_heads)
        yield window, Far(start, away, count, likes, dots)


def compare(seen: Observation, turn: Rotation | None, first: int, probes: dict[str, Probe], speak: int) -> Tensor:
    """One layer: every probe against every oracle. [windows, probes and DOT and REFERENCES, oracles, measures]"""
    results, given = [], attention(seen)
    for window, far in windows(seen, turn, first, speak, given):
        count, away, start = far.count, far.away, far.start
        per_chunk = given[start : start + WINDOW, away].unflatten(1, (count, CHUNK)).sum(-1)
        similar = normalize(window.queries, dim=1) @ far.likes.T
        oracles = (per_chunk.sum(0), per_chunk.amax(0), similar.amax(0))
        ranked = [far.likes @ probe(window) for probe in probes.values()]
        ranked += [far.dots @ probe(window) for probe in DOT.values()]
        order = torch.arange(count, device=given.device).float()
        ranked += [order, given[start - NEAR : start, away].sum(0).view(count, CHUNK).sum(1)]
        results.append(torch.stack([torch.stack([agreement(r, o) for o in oracles]) for r in ranked]))
    return torch.stack(results)


def agreement(score: Tensor, truth: Tensor) -> Tensor:
    """Spearman's ρ, and how many of the truth's best chunks are retrieved: of a quarter of all, of RETRIEVED."""
    chunks = len(score)
    ranks = torch.stack([score, truth]).argsort(1).argsort(1).float()
    found = [torch.corrcoef(ranks)[0, 1].item()]
    for retrieved in (min(RETRIEVED, chunks // 4), RETRIEVED):
        best = truth.topk(min(BEST, retrieved, chunks)).indices
        share = torch.isin(best, score.topk(min(retrieved, chunks)).indices).float().mean().item()
        found.append(share if retrieved < chunks else float("nan"))  # all are retrieved: no choice
    return torch.tensor(found)


def interval(windows: Tensor) -> str:
    """Mean, and where 95 % of the means of windows drawn with replacement lie."""
    windows = windows[~windows.isnan()]
    source = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(windows), (10_000, len(windows)), generator=source)
    low, high = windows[drawn].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return f"{windows.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def table(title: str, head: Iterable[str], rows: Iterable[Iterable]) -> str:
    lines = [f"\n## {title}\n", "| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * lines[-1].count(" | ") + "---|")
    for row in rows:
        cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(results: Tensor, names: list[str]) -> str:
    """results [layers, windows of all texts, probes, oracles, measures]"""
    layers, windows = results.shape[:2]
    columns = [(o, m) for m in range(len(MEASURES)) for o in range(2)] + [(2, 0)]
    head = ["probe", *(f"{MEASURES[m]}, {ORACLES[o]}" for o, m in columns), "median ρ, sum (quartiles)"]
    rows = []
    for p, name in enumerate(names):
        low, middle, high = results[:, :, p, 0, 0].flatten().quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        means = (results[:, :, p, o, m].nanmean().item() for o, m in columns)
        rows.append([name, *means, f"{middle:.2f} ({low:.2f}–{high:.2f})"])
    text = table(f"Probes against oracles, mean of {layers} layers and {windows} windows", head, rows)

    columns = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    head = ["probe", "layers", *(f"{MEASURES[m]}, {ORACLES[o]}" for o, m in columns)]
    gap = results - results[:, :, names.index("mean") : names.index("mean") + 1]
    thirds = dict(zip(("first third", "middle third", "last third"), gap.tensor_split(3), strict=True))
    rows = []
    for p, name in enumerate(names):
        if name != "mean":
            parts = {"all": gap} | (thirds if name in PROBES or name in DOT else {})
            for label, part in parts.items():
                rows.append([name, label, *(interval(part[:, :, p, o, m].mean(0)) for o, m in columns)])
    return text + "\n" + table("Difference to the mean probe, paired over windows [95 % bootstrap]", head, rows)


def texts(folder: Path, tokenizer, tokens: int, samples: int) -> list[Tensor]:
    """The beginnings of the first files that are long enough."""
    ids = (tokenizer(path.read_text(), add_special_tokens=False).input_ids for path in sorted(folder.glob("*.txt")))
    enough = [torch.tensor(text[:tokens]) for text in ids if len(text) >= tokens]
    if len(enough) < samples:
        sys.exit(f"{folder} has {len(enough)} texts of {tokens} tokens; --samples {samples} needs more of them.")
    return enough[:samples]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--first", type=int, default=1024, help="where the first window that counts begins")
    parser.add_argument("--representatives", type=int, default=CHUNK, help="tokens that represent a chunk")
    parser.add_argument("--model", default=None)
    parser.add_argument("--variants", action="store_true", help="other ways to weigh queries, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet_transformers()
    model, tokenizer = load(options.model, dtype="float32")
    turns = rotations(model, list(range(model.config.num_hidden_layers)))
    probes = PROBES | (VARIANTS if options.variants else {})
    results = []
    with torch.inference_mode():
        for ids in texts(options.texts, tokenizer, options.length, options.samples):
            results.append(
                watch(
                    lambda seen: compare(seen, turns[seen.layer], options.first, probes, options.representatives),
                    model,
                    ids,
                )
            )
    text = report(torch.cat(results, 1), [*probes, *DOT, *REFERENCES])
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
