"""Figures of the papers that show what a model does inside: python benchmarks/figures.py protokv/figure4 --data DIR

--data holds LongBench's files (else they are downloaded), --haystack plain-text prose (*.txt) for needles and AhaKV's
figures. --small is one short text on the default model. Every figure is printed as Markdown tables, by layers where the
paper draws one panel for each. `kvkeep reproduce NAME` has what the paper prints of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import claims
import figures_protokv as protokv
import probe
import torch
from claims import table
from claims_attention import BEST, BLOCK, STRETCHES, THRESHOLDS, answer_of, hit_rates, offsets, positions, span, thirds
from torch import Tensor
from torch.nn.functional import normalize
from torch.special import entr

import kvkeep
from kvkeep.cache.retrieval import LayerRetriever
from kvkeep.compress.attention import attention
from kvkeep.errors import KvkeepError
from kvkeep.evaluate import suite
from kvkeep.evaluate.prompt import build_prompt
from kvkeep.evaluate.sample import Sample
from kvkeep.model.hf_cache import context_length
from kvkeep.model.load import load, quiet_transformers
from kvkeep.model.rope import rotations
from kvkeep.types import Observation

TOP = 4096 / 124_000  # IntentKV's figure 2: the most attended tokens of a text
ROWS = 256  # queries whose attention is summed, or compared
EDGE = 32  # first and last tokens that figure 2 (c) leaves out
DISTANCES = (1, 2, 4, 16, 64, 255)
PARTS = ("first layers", "middle layers", "last layers", "all layers")


@dataclass
class Lab(claims.Lab):
    """A model, prose to hide things in, and prompts of benchmarks."""

    data: Path | None = None
    length: int = 8192  # tokens of a prompt; longer ones lose their middle
    small: bool = False

    def prompts(self, task: str) -> list[tuple[Sample, Tensor]]:
        """The first `samples` samples of a task, and their prompts' ids."""
        return list(islice(self.all_prompts(task), self.samples))

    def all_prompts(self, task: str) -> Iterator[tuple[Sample, Tensor]]:
        samples, _ = suite.load([task], self.tokenizer, suite.Sources(data=self.data))
        for sample in samples:
            limit = context_length(self.model)
            yield sample, build_prompt(self.tokenizer, sample, "aware", limit, self.length).context

    def layers(self, look: Callable[[Observation], Tensor], texts: list[Tensor], voters: int) -> Tensor:
        """`look` of every layer, as the mean over texts. [layers, ..]"""
        found = [torch.stack(self.watch(lambda seen: look(seen).float().cpu(), ids, voters)) for ids in texts]
        return torch.stack(found).mean(0)


# IntentKV


def coverage(lab: Lab) -> str:
    """Figure 2: how much attention few tokens get, of one query and of many; and what a peak's neighbours get."""
    task = "longbench/narrativeqa" if lab.small else "infinitebench/longbook_qa_eng"
    texts = [ids for _, ids in lab.prompts(task)]
    found = lab.layers(_coverage, texts, ROWS)
    head = ["layers", "(a) one query", f"(b) {ROWS} queries", "(c) most attended token", "its 4 neighbours, mean"]
    rows = [[name, *(f"{each:.4f}" for each in part)] for name, part in zip(PARTS, thirds(found), strict=True)]
    tokens = sum(map(len, texts)) // len(texts)
    title = f"Attention of the top {TOP:.1%} of {tokens:,} tokens, and of the most attended one and its neighbours"
    return table(title, head, rows)


def _coverage(seen: Observation) -> Tensor:
    rows = attention(seen, ROWS).flatten(0, 1)
    top = max(1, int(TOP * seen.tokens))
    share = [(some.topk(top).values.sum(1) / some.sum(1)).mean() for some in (rows[:, -1], rows.sum(1))]
    inner = rows[:, -16:].flatten(0, 1)[:, EDGE:-EDGE]
    peak = inner.max(1)
    near = peak.indices[:, None] + torch.tensor([-2, -1, 1, 2], device=inner.device)
    beside = inner.gather(1, near.clamp(0, inner.shape[1] - 1)).mean()
    return torch.stack([*share, peak.values.mean(), beside])


def hits_by_layer(lab: Lab) -> str:
    """Figure 3: how often the best blocks of a segment hold the answer, by layer."""
    rates, luck = hit_rates(lab, min(lab.length, 4466))
    head = ["layer", "48–33 before", "32–17 before", "16 before the question", "question", "answer"]
    rows = [[layer, *each.tolist()] for layer, each in enumerate(rates.mean(1))]
    title = f"How often the {BEST} best blocks of {BLOCK} hold the answer, mean over heads (random blocks: {luck:.2f})"
    return table(title, head, rows)


def example(lab: Lab) -> str:
    """Figures 6 to 8: one question, where its answer's tokens look, and how rows of attention differ."""
    sample, ids = next(
        (each for each in lab.all_prompts("longbench/multifieldqa_en") if _answer_place(lab, *each)), (None, None)
    )
    if sample is None:
        raise KvkeepError("no prompt holds its own answer; use a larger --length.")
    said = answer_of(lab, ids)
    whole = torch.cat([ids, said])
    begins, ends = _answer_place(lab, sample, ids)
    asked = span(lab.tokenizer, ids, _question(sample))[0]
    facts = [
        ["tokens", len(ids)], ["question", _question(sample)], ["answer", sample.references[0]],
        ["prediction", lab.tokenizer.decode(said)],
    ]  # fmt: skip
    first = min(asked - 64, len(whole) - 128)
    found = lab.watch(lambda seen: attention(seen, len(whole) - first).flatten(0, 1).cpu(), whole, len(whole) - first)
    return "\n".join(
        [
            table("Figure 6: the example", ["fact", "value"], facts),
            _moving(lab, found, whole, len(said), slice(begins, ends)),
            _divergences(found, [asked - first, len(ids) - first, len(whole) - first]),
        ]
    )


def _question(sample: Sample) -> str:
    """The question itself, without the words that introduce it and the cue after it."""
    return sample.question.partition("Question:")[2].partition("\n")[0].strip() or sample.question.strip()


def _answer_place(lab: Lab, sample: Sample, ids: Tensor) -> tuple[int, int] | None:
    text, _ = offsets(lab.tokenizer, ids)
    answer = sample.references[0]
    return span(lab.tokenizer, ids, answer) if answer in text and _question(sample) in text else None


def _moving(lab: Lab, found: list[Tensor], whole: Tensor, new: int, answer: slice) -> str:
    """Figure 7: the head that looks at the answer most, token by token of what is said."""
    rows = torch.stack([layer[:, -new - 1 : -1, answer] for layer in found])  # the query before a token predicts it
    best = rows.sum((2, 3)).flatten().argmax().item()
    layer, head = divmod(best, rows.shape[1])
    words = [lab.tokenizer.decode(token) for token in whole]
    lines = []
    for word, row in zip(words[-new:], rows[layer, head], strict=True):
        lines.append([repr(word), row.sum().item(), repr(words[answer.start + row.argmax().item()]), row.max().item()])
    title = f"Figure 7: attention to the answer in layer {layer}, query head {head}"
    return table(title, ["said", "to the answer's tokens", "most of it to", "which gets"], lines)


def _divergences(found: list[Tensor], ends: list[int]) -> str:
    """Figure 8: mean Jensen-Shannon divergence between rows of three segments, a head's mean over some layers."""
    layers = sorted({len(found) // 4, len(found) // 2, 3 * len(found) // 4})
    divergence = torch.stack([_jsd(row) for layer in layers for row in found[layer].mean(0)[None]]).mean(0)
    starts = [0, *ends[:-1]]
    parts = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
    names = ("text before", "question", "answer")
    rows = [[name, *(divergence[a, b].mean().item() for b in parts)] for name, a in zip(names, parts, strict=True)]
    return table(f"Figure 8: divergence between segments, layers {layers}", ["rows of", *names], rows)


def _jsd(rows: Tensor) -> Tensor:
    """Between all pairs. [m, n] -> [m, m]"""
    own = entr(rows).sum(1)
    both = torch.stack([entr((rows + row) / 2).sum(1) for row in rows])
    return both - (own + own[:, None]) / 2


# IntelLLM


def sparsity(lab: Lab) -> str:
    """Figure 1: alike queries, tokens that all of them attend to, and how little attention is not sparse."""
    texts = [ids for _, ids in lab.prompts("longbench/narrativeqa")]
    found = lab.layers(_sparsity, texts, ROWS)
    head = [
        "layers", *(f"(a) cosine, {d} apart" for d in DISTANCES), *(f"(b) shared, {d} apart" for d in (1, 64, 255)),
        "(c) sparse",
    ]  # fmt: skip
    rows = [[name, *part.tolist()] for name, part in zip(PARTS, thirds(found), strict=True)]
    title = (
        f"The last {ROWS} queries: their cosine; the share of the top 1 % of tokens that two of them have in common; "
        "the share of attention scores below 1/t"
    )
    return table(title, head, rows)


def _sparsity(seen: Observation) -> Tensor:
    queries = normalize(seen.queries[:, -ROWS:].float(), dim=2)
    alike = queries @ queries.transpose(1, 2)
    cosines = [alike.diagonal(d, 1, 2).mean() for d in DISTANCES]
    rows = attention(seen, ROWS).flatten(0, 1)
    best = torch.zeros_like(rows).scatter_(2, rows.topk(max(1, seen.tokens // 100)).indices, 1.0)
    shared = [(best[:, d:] * best[:, :-d]).sum(2).mean() / best[0, 0].sum() for d in (1, 64, 255)]
    t = torch.arange(seen.tokens - rows.shape[1] + 1, seen.tokens + 1, device=rows.device)
    below = (rows < 1 / t[:, None]).sum(2) - (seen.tokens - t)  # without the tokens a query cannot see
    return torch.stack([*cosines, *shared, (below / t).mean()])


# AhaKV


def sentence(lab: Lab) -> str:
    """Figure 1: one sentence."""
    return _bias(lab, 60, 20)


def bias(lab: Lab) -> str:
    """Figures 2, 5 and 6."""
    return _bias(lab, 400, 80) if lab.small else _bias(lab, 3600, 720)


def _bias(lab: Lab, tokens: int, budget: int) -> str:
    scores, kept, above = positions(lab, tokens, budget)
    tenths = [f"{i * 10}–{i * 10 + 10} %" for i in range(STRETCHES)]
    where, place = f"{tokens:,} tokens, budget {budget}, by tenth of the text", ["mean place", "entropy / uniform"]
    head = ["method", *tenths, *place, *(f"{name}, recent ones apart" for name in place)]
    texts = [table(f"Share of the eviction score: {where}", ["method", *tenths], scores)]
    texts += [table(f"Share of the tokens kept: {where}", head, kept)]
    title = "Share of tokens with at least this share of their head's highest score"
    return "\n".join([*texts, table(title, ["score", *(f"{limit:g}" for limit in THRESHOLDS)], above)])


# ActQKV


def retrieved_scores(lab: Lab) -> str:
    """Figure 3: cosines of the retrieved chunks with either probe, and the perplexity of their softmax, by layer."""
    turns = rotations(lab.model, list(range(lab.model.config.num_hidden_layers)))
    texts = [ids[: lab.length] for _, ids in lab.prompts("longbench/narrativeqa")]
    found = [
        torch.stack(lab.watch(lambda seen: _retrieved(seen, turns[seen.layer]), ids, len(ids))) for ids in texts
    ]  # [layers, probes, 4]
    head = ["layer"]
    for name in ("activation bias", "mean (InfLLM)"):
        head += [f"{name}: quartile 1", "median", "quartile 3", "perplexity"]
    rows = [[layer, *each.flatten().tolist()] for layer, each in enumerate(torch.stack(found).mean(0))]
    chunks = f"best chunks of {probe.CHUNK} (at most {probe.RETRIEVED})"
    return table(f"Cosines of the {chunks} that a window of {probe.WINDOW} queries retrieves", head, rows)


def _retrieved(seen: Observation, turn: Any) -> Tensor:
    """[2 probes, 4]"""
    quartiles, found = torch.tensor([0.25, 0.5, 0.75]), []
    start = max(2 * probe.NEAR, seen.tokens // 2)  # windows that have chunks to choose from
    for window, far in probe.windows(seen, turn, start, probe.CHUNK, probe.attention(seen)):
        for make in (probe.PROBES["activation bias"], probe.PROBES["mean"]):
            scores = (far.likes @ normalize(make(window), dim=0)).float().cpu()
            best = scores.topk(min(probe.RETRIEVED, len(scores))).values
            perplexity = entr(best.softmax(0)).sum().exp()
            found.append(torch.cat([best.quantile(quartiles), perplexity[None]]))
    return torch.stack(found).unflatten(0, (-1, 2)).mean(0)


def recalled(lab: Lab, steps: int = 16) -> str:
    """Figure 5: tokens that a decode step retrieves, by layer."""
    budget, shares = (512 if lab.small else 2048), []

    divide = LayerRetriever._share

    def share(*asked: Any) -> Any:
        state, tokens = divide(*asked)
        shares.append(tokens)  # layer after layer
        return state, tokens

    for _, ids in lab.prompts("longbench/narrativeqa"):
        cache = kvkeep.Cache(lab.model, "actqkv", budget)
        logits = lab.model(ids[None].to(lab.model.device), past_key_values=cache, logits_to_keep=1).logits
        with mock.patch.object(LayerRetriever, "_share", share):
            for _ in range(steps):
                logits = lab.model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
    found = torch.tensor(shares).view(-1, lab.model.config.num_hidden_layers)
    rows = [[layer, each.float().mean().item(), int(each.min()), int(each.max())] for layer, each in enumerate(found.T)]
    title = f"Tokens a layer may retrieve in decode, budget {budget:,}, {len(found)} steps"
    return table(title, ["layer", "mean", "fewest", "most"], rows)


FIGURES: dict[str, Callable[[Lab], str]] = {
    "intentkv/figure2": coverage,
    "intentkv/figure3": hits_by_layer,
    "intentkv/figure6-8": example,
    "intelllm/figure1": sparsity,
    "ahakv/figure1": sentence,
    **dict.fromkeys(("ahakv/figure2", "ahakv/figure5", "ahakv/figure6"), bias),
    "actqkv/figure3": retrieved_scores,
    "actqkv/figure5": recalled,
    **protokv.FIGURES,
}
PROSE = (hits_by_layer, sentence, bias, protokv.needles)  # these need --haystack


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(FIGURES))
    parser.add_argument("--data", type=Path, help="a folder of LongBench's files; else they are downloaded")
    parser.add_argument("--haystack", type=Path, help="a folder of plain-text prose")
    parser.add_argument("--samples", type=int, help="texts; 20, or 1 with --small")
    parser.add_argument("--length", type=int, help="tokens of a text; longer ones lose their middle")
    parser.add_argument("--model")
    parser.add_argument("--device")
    parser.add_argument("--small", action="store_true", help="one short text, the default model")
    options = parser.parse_args()
    draw = FIGURES[options.name]
    if draw in PROSE and not options.haystack:
        parser.error(f"{options.name} needs --haystack, a folder of plain-text prose.")
    print(draw(_lab(options)))


def _lab(options: argparse.Namespace) -> Lab:
    quiet_transformers()
    model, tokenizer = load(None if options.small else options.model, device=options.device)
    files = sorted(options.haystack.glob("*.txt"))[:30] if options.haystack else []
    prose = tokenizer("\n\n".join(path.read_text() for path in files), add_special_tokens=False).input_ids
    samples = options.samples or (1 if options.small else 20)
    length = options.length or (1536 if options.small else min(context_length(model), 131_072))
    return Lab(model, tokenizer, prose, samples, 1, options.data, length, options.small)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
