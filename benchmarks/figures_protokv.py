"""ProtoKV's figures of keys that are unlike their neighbours. Used by figures.py, with its Lab."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from claims import table
from claims_attention import offsets, span, thirds, tokens_of
from torch import Tensor
from torch.nn.functional import normalize

import kvkeep
from kvkeep.compress.attention import attention, attention_received, outlier_degree, token_mask
from kvkeep.compress.guard import Guard
from kvkeep.compress.method import Method
from kvkeep.evaluate.metrics import METRICS
from kvkeep.kernels.dispatch import key_similarity
from kvkeep.types import Observation

KAPPA = 5
PARTS = ("first layers", "middle layers", "last layers", "all layers")
LIMITS = (0.0, 0.5, 1.0, 1.5, 1.75, 2.0, 2.5, 3.0)  # of the outlier degree; the paper's threshold is about 1.5
DECODED = 32  # tokens whose attention is counted
DROPPED = (5, 25, 100)  # keys and values of each head
SIXTEEN = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
METHODS = ("streamingllm", "h2o", "snapkv:window=32", "chunkkv", "pyramidkv", "protokv", "protokv:votes=raw")
RUNS, TEMPERATURE, TOP_K = 5, 0.6, 20


def _texts(lab: Any, tasks: tuple[str, ...] = ("triviaqa", "samsum")) -> list[Tensor]:
    return [ids for task in tasks[: 1 if lab.small else None] for _, ids in lab.prompts(f"longbench/{task}")]


def _by_part(found: Tensor) -> list[list]:
    return [[name, *part.tolist()] for name, part in zip(PARTS, thirds(found), strict=True)]


def degrees(lab: Any) -> str:
    """Figures 2, 34 to 36 and 37: how many tokens have a high degree, and in how many heads."""

    def look(seen: Observation) -> Tensor:
        degree = outlier_degree(seen, KAPPA)
        above = torch.stack([(degree > limit).float().mean(1) for limit in LIMITS])
        return torch.cat([above.mean(1), (above[3:6] > 0).float().mean(1)])

    found = lab.layers(look, _texts(lab), 1)
    head = ["layers", *(f"> {limit:g}" for limit in LIMITS), *(f"heads with any > {each:g}" for each in LIMITS[3:6])]
    return table("Share of tokens by outlier degree, and of KV heads that have any", head, _by_part(found))


def similarities(lab: Any) -> str:
    """Figures 3 and 14 to 19: the similarity of keys and their neighbours."""
    quantiles = torch.tensor([0.01, 0.1, 0.5, 0.9])

    def look(seen: Observation) -> Tensor:
        similarity = key_similarity(seen.keys, token_mask(seen), KAPPA)
        all_of = similarity.quantile(quantiles.to(similarity.device), dim=1).mean(1)
        return torch.cat([all_of, similarity[:, :4].mean()[None]])

    head = ["layers", "lowest 1 %", "lowest 10 %", "median", "highest 10 %", "mean of the first 4 tokens"]
    return table("Neighbourhood similarity of keys", head, _by_part(lab.layers(look, _texts(lab), 1)))


def clusters(lab: Any) -> str:
    """Figures 4 and 20 to 23: how alike the tokens above a degree are, beside their likeness to the others."""

    def look(seen: Observation) -> Tensor:
        degree, keys = outlier_degree(seen, KAPPA), normalize(seen.keys.float(), dim=2)
        return torch.stack([clustering_degree(keys, degree > limit).nanmedian() for limit in LIMITS])

    tasks = ("triviaqa", "2wikimqa", "narrativeqa", "hotpotqa")
    texts = _texts(lab, tasks)
    found = [torch.stack(lab.watch(lambda seen: look(seen).cpu(), ids, 1)) for ids in texts]
    parts = zip(PARTS, thirds(torch.stack(found).nanmean(0)), strict=True)
    head = ["layers", *(f"Θ > {limit:g}" for limit in LIMITS)]
    return table("Clustering degree Γ, median over KV heads", head, [[name, *part.tolist()] for name, part in parts])


def clustering_degree(keys: Tensor, chosen: Tensor) -> Tensor:
    """Γ = intra / inter, definition 3; nan of heads with no such token. keys [kv_heads, n, dim] of norm 1"""
    inside, outside = (torch.einsum("hnd,hn->hd", keys, some.float()) for some in (chosen, ~chosen))
    count, rest = chosen.sum(1), (~chosen).sum(1)
    intra = inside.square().sum(1) / count.square()
    inter = (inside * outside).sum(1) / (count * rest)
    return torch.where((count > 0) & (rest > 0), intra / inter, torch.nan)


def anchors(lab: Any) -> str:
    """Figures 5 and 26 to 29."""
    return _attended(lab, 0)


def without_sinks(lab: Any) -> str:
    """Figure 30: the same without the first ten tokens."""
    return _attended(lab, 10)


def _attended(lab: Any, skip: int) -> str:
    """The share of decoded tokens' attention to the context that each tenth of its tokens by degree gets."""
    decoded = []
    for ids in _texts(lab):
        ids = ids.to(lab.model.device)[None]
        how = {"max_new_tokens": DECODED, "min_new_tokens": DECODED, "do_sample": False}
        decoded.append(lab.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0])
    found = lab.layers(lambda seen: tenths(seen, skip), decoded, DECODED)
    head = ["layers", "highest tenth", *(f"{i}." for i in range(2, 10)), "lowest tenth"]
    left = f", the first {skip} left out" if skip else ""
    return table(f"Share of {DECODED} decoded tokens' attention by outlier degree{left}", head, _by_part(found))


def tenths(seen: Observation, skip: int) -> Tensor:
    """The share of attention of each tenth of the context by degree, highest first; mean over KV heads. [10]"""
    end = seen.tokens - DECODED
    degree = outlier_degree(seen, KAPPA)[:, skip:end]
    given = attention(seen, DECODED).mean((1, 2))[:, skip:end]
    order = degree.argsort(1, descending=True)
    sums = torch.stack([part.sum(1) for part in given.gather(1, order).tensor_split(10, 1)], 1)
    return (sums / sums.sum(1, keepdim=True)).mean(0)


def dropped(lab: Any) -> str:
    """Figures 6 and 25: scores after some keys and values of every head are dropped, by three rules.

    Deviation: attention is that of the prompt's last 32 queries, not of the answer's.
    """
    rules: dict[str, Callable] = {
        "highest degree": lambda seen: outlier_degree(seen, KAPPA),
        "most attention": lambda seen: attention_received(seen, 32),
        "at random": _noise,
    }
    prompts = lab.prompts("longbench/triviaqa")
    rows = [["none", *[_score(lab, prompts, "full", 0)] * (1 if lab.small else len(DROPPED))]]
    counts = DROPPED[1:2] if lab.small else DROPPED
    for name, rule in rules.items():
        method = Method("drop", lambda seen, budget, rule=rule: -rule(seen), Guard(), observation_window=32)
        rows.append([name, *(_score(lab, prompts, method, count) for count in counts)])
    title = "Score on TriviaQA, by what is dropped of every head"
    return table(title, ["dropped", *map(str, counts)], rows)


def _noise(seen: Observation) -> Tensor:
    source = torch.Generator().manual_seed(seen.layer)
    return torch.rand(seen.keys.shape[:2], generator=source).to(seen.keys.device)


def _score(lab: Any, prompts: list, method: Any, count: int, budget: int | None = None, **sampling: Any) -> float:
    """Mean score, percent, of answers from what is left of each prompt: a budget, or all but `count` tokens."""
    scores = []
    for sample, ids in prompts:
        cache = kvkeep.Cache(lab.model, method, budget or len(ids) - count)
        row = ids.to(lab.model.device)[None]
        how = {"do_sample": False, **sampling, "max_new_tokens": sample.max_new_tokens}
        out = lab.model.generate(row, attention_mask=torch.ones_like(row), past_key_values=cache, **how)
        answer = lab.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        scores.append(METRICS[sample.metric](answer, list(sample.references), **sample.extra))
    return 100 * sum(scores) / len(scores)


def labels(lab: Any) -> str:
    """Figure 31: the degree of label words and of the texts before them, by layers.

    Deviation: TREC's examples as LongBench has them, not IMDB's and AGNews'.
    """
    found = []
    for _, ids in lab.prompts("longbench/trec"):
        text, places = offsets(lab.tokenizer, ids)
        examples = [match for match in re.finditer(r"Question: (.+)\nType: (.+)\n", text)]
        groups = [[t for each in examples for t in tokens_of(places, *each.span(part))] for part in (1, 2)]
        look = lambda seen, groups=groups: torch.stack(  # noqa: E731
            [outlier_degree(seen, KAPPA)[:, some].mean() for some in groups]
        )
        found.append(lab.layers(look, [ids], 1))
    rows = _by_part(torch.stack(found).mean(0))
    return table("Mean outlier degree of examples' texts and of their labels", ["layers", "text", "label"], rows)


def needles(lab: Any) -> str:
    """Figure 32: the neighbourhood similarity of a needle and of the text around it."""
    found = []
    for seed in range(lab.samples):
        ids, number = lab.needle(seed, min(lab.length, 4096))
        begins, ends = span(lab.tokenizer, ids, f"The special magic number for the lighthouse is {number}")
        inside = torch.zeros(len(ids), dtype=torch.bool)
        inside[begins:ends] = True

        def look(seen: Observation, inside=inside) -> Tensor:
            similarity = key_similarity(seen.keys, token_mask(seen), KAPPA)
            own, rest = similarity[:, inside].mean(1), similarity[:, ~inside].mean(1)
            return torch.stack([own.mean(), rest.mean(), (own < rest).float().mean()])

        found.append(lab.layers(look, [ids], 1))
    head = ["layers", "needle", "text around it", "KV heads where the needle's is lower"]
    return table("Mean neighbourhood similarity", head, _by_part(torch.stack(found).mean(0)))


def sampled(lab: Any) -> str:
    """Figure 38: five sampled answers to every question, the mean of their scores and its standard deviation."""
    tasks, methods, runs, budget = SIXTEEN, METHODS, RUNS, 128
    if lab.small:
        tasks, methods, runs = ("triviaqa",), ("snapkv:window=32", "protokv", "protokv:votes=raw"), 2
    rows = []
    for task in tasks:
        prompts = lab.prompts(f"longbench/{task}")
        for method in methods:
            scores = []
            for run in range(runs):
                torch.manual_seed(run)
                how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K}
                scores.append(_score(lab, prompts, method, 0, budget, **how))
            found = torch.tensor(scores)
            rows.append([task, method, found.mean().item(), found.std().item()])
    title = f"{runs} runs at temperature {TEMPERATURE}, top-k {TOP_K}, budget {budget}"
    return table(title, ["task", "method", "mean score", "standard deviation"], rows)


def _named(numbers: str, draw: Callable[[Any], str]) -> dict[str, Callable[[Any], str]]:
    return {f"protokv/figure{number}": draw for number in numbers.split()}


FIGURES = {
    **_named("2 34-37", degrees),
    **_named("3 14-19", similarities),
    **_named("4 20-23", clusters),
    **_named("5 26-29", anchors),
    **_named("30", without_sinks),
    **_named("6 25", dropped),
    **_named("31", labels),
    **_named("32", needles),
    **_named("38", sampled),
}
