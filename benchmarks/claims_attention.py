"""The papers' claims on attention: where a question begins, what it attends to, which positions are favoured.

Used by claims.py, with its Lab. Every function returns the rows of its tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.compress.attention import attention, squared_value_norms, token_mask
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.compress.pipeline import compress, update_token_state
from kvkeep.compress.scorers.ahakv import relative_value_norms
from kvkeep.compress.scorers.intentkv import IntentKVScorer
from kvkeep.kernels.torch.scoring import pool
from kvkeep.types import Observation

QUESTIONS = (
    "What is the special magic number for the lighthouse? Answer with the number only.",
    "What is the special magic number?",
    "Question: Based on the text above, which seven-digit number was given as the special magic number for the old "
    "lighthouse?",
    "Tell me the magic number for the lighthouse mentioned in the text.",
)
VARIANTS = (("first", 8), ("first", 1), ("subsequent", 8), ("subsequent", 4), ("subsequent", 1))
SEGMENT, BLOCK, BEST, SENSITIVE = 16, 64, 10, 0.7  # IntentKV, appendix C.2
STRETCHES, THRESHOLDS = 10, (1e-4, 1e-3, 1e-2, 1e-1)
JUDGES = ("h2o", "snapkv", "ahakv", "ahakv:recent_only=false", "ahakv:step_gain=false", "ahakv:value_prior=false")


def offsets(tokenizer: Any, ids: Tensor) -> tuple[str, list[tuple[int, int]]]:
    """The text of a prompt, and the characters each of its tokens stands for."""
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    again = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    if again.input_ids != ids.tolist():
        raise ValueError("the prompt does not survive being decoded; places in it cannot be told.")
    return text, again.offset_mapping


def tokens_of(places: Sequence[tuple[int, int]], start: int, end: int) -> list[int]:
    """The tokens that hold any of these characters."""
    return [i for i, (a, b) in enumerate(places) if b > start and a < end]


def span(tokenizer: Any, ids: Tensor, words: str) -> tuple[int, int]:
    """The tokens that hold the last occurrence of these words, from … to (not included)."""
    text, places = offsets(tokenizer, ids)
    start = text.rindex(words)
    inside = tokens_of(places, start, start + len(words))
    return inside[0], inside[-1] + 1


# IntentKV: where the question begins


def boundaries(lab: Any, tokens: int = 2000, window: int = 64) -> list[list]:
    """Per variant: how often a query head finds the question's true beginning."""
    offsets: dict[tuple, list[int]] = {each: [] for each in VARIANTS}
    zeros = dict.fromkeys(VARIANTS, 0)
    for seed in range(lab.samples):
        question = QUESTIONS[seed % len(QUESTIONS)]
        ids, _ = lab.needle(seed, tokens, question)
        begins = span(lab.tokenizer, ids, question)[0] - (len(ids) - window)
        for layer in lab.watch(lambda seen: [_starts(seen, window, *each) for each in VARIANTS], ids, window):
            for each, starts in zip(VARIANTS, layer, strict=True):
                offsets[each] += [start - begins for start in starts]
                zeros[each] += sum(start == 0 for start in starts)
    return [_found(each, offsets[each], zeros[each]) for each in VARIANTS]


def _starts(seen: Observation, window: int, boundary: str, smooth: int) -> list[int]:
    """The row each query head's question begins with."""
    votes = IntentKVScorer(window, smooth, True, boundary).weights(attention(seen, window).flatten(0, 1))
    return (votes > 0).int().argmax(1).tolist()


def _found(each: tuple[str, int], offsets: list[int], zeros: int) -> list:
    (boundary, smooth), n = each, len(offsets)
    share = lambda low, high: sum(low <= offset <= high for offset in offsets) / n  # noqa: E731
    quartiles = torch.tensor(offsets).float().quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return [
        f"boundary={boundary}, smooth={smooth}", share(0, 0), share(-4, 4), share(-smooth, 4), zeros / n,
        " / ".join(f"{quartile:+.0f}" for quartile in quartiles),
    ]  # fmt: skip


# IntentKV, appendix C.2: what the question attends to


def hits(lab: Any, tokens: int = 4466) -> list[list]:
    """How often a segment's 10 best blocks of 64 hold the whole answer, for heads sensitive to it or not."""
    rates, luck = hit_rates(lab, tokens)
    each = rates.flatten(0, 1)
    keen = each[:, -1] >= SENSITIVE
    groups = {"sensitive": each[keen], "insensitive": each[~keen], "all": each}
    return [
        [name, *(some.mean(0).tolist() if len(some) else ["–"] * 5), luck, len(some)] for name, some in groups.items()
    ]


def hit_rates(lab: Any, tokens: int) -> tuple[Tensor, float]:
    """The share of samples in which a segment of a head hits, and that of random blocks. [layers, heads, segments]

    Segments are 16 tokens: three before the question, the question's last, and the answer.
    """
    rates, chance = [], []
    for seed in range(lab.samples):
        ids, number = lab.needle(seed, tokens)
        whole = torch.cat([ids, answer_of(lab, ids)])
        begins, ends = span(lab.tokenizer, ids, QUESTIONS[0])
        parts = [(begins - SEGMENT * i, begins - SEGMENT * (i - 1)) for i in (3, 2, 1)]
        parts += [(max(begins, ends - SEGMENT), ends), (len(ids), len(whole))]
        a, b = span(lab.tokenizer, ids, number)
        answer = range(a // BLOCK, (b - 1) // BLOCK + 1)
        voters = len(whole) - parts[0][0]
        look = partial(_hit, voters=voters, n=len(ids), parts=parts, answer=answer)
        rates.append(torch.stack(lab.watch(look, whole, voters)))
        blocks = math.ceil(len(ids) / BLOCK)
        chance.append(math.comb(blocks - len(answer), BEST - len(answer)) / math.comb(blocks, BEST))
    return torch.stack(rates).mean(0), sum(chance) / len(chance)


def answer_of(lab: Any, ids: Tensor) -> Tensor:
    """The full model's answer to a prompt: at most a segment, without its end token."""
    ids = ids.to(lab.model.device)[None]
    out = lab.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=SEGMENT, do_sample=False
    )[0, ids.shape[1] :].cpu()  # fmt: skip
    said = out[out != lab.tokenizer.eos_token_id]
    return said if len(said) else out


def _hit(seen: Observation, voters: int, n: int, parts: Sequence[tuple[int, int]], answer: range) -> Tensor:
    """Whether all blocks of the answer are among a segment's best. -> [heads, segments] float"""
    rows, first = attention(seen, voters).flatten(0, 1), seen.seq_len - voters
    found = []
    for a, b in parts:
        given = rows[:, a - first : b - first, :n].sum(1)
        blocks = pad(given, (0, -n % BLOCK)).unflatten(1, (-1, BLOCK)).sum(-1)
        best = blocks.topk(min(BEST, blocks.shape[1])).indices
        found.append(torch.stack([(best == block).any(1) for block in answer]).all(0))
    return torch.stack(found, 1).float().cpu()


# AhaKV, figures 2, 5 and 6: which positions are favoured


def positions(lab: Any, tokens: int = 3600, budget: int = 720) -> tuple[list[list], list[list], list[list]]:
    """Mean over layers and KV heads: each tenth of the text's share of the eviction score (figures 2a, 2b), its share
    of the kept tokens (2c, 5, 6) with their mean place and entropy, also without those kept for being recent, and 2d's
    share of tokens above a threshold.
    """
    methods = [parse(spec) for spec in JUDGES]
    scores, kept, above = [], [], []
    for seed in range(lab.samples):
        ids = torch.tensor(lab.stretch(2000 + seed, tokens))
        for judged, passed in lab.watch(
            lambda seen: (_judged(seen, methods, budget), _passed(seen, budget)), ids, tokens
        ):
            scores.append(torch.stack([score for score, _ in judged]))
            kept.append(torch.stack([places for _, places in judged]))
            above.append(passed)
    each = torch.stack(kept).float().mean(0)
    shares = torch.stack(scores).mean(0).tolist()
    return (
        [[spec, *row] for spec, row in zip(JUDGES, shares, strict=True)],
        [
            [spec, *all_of.tolist(), *_shape(all_of), *_shape(some)]
            for spec, (all_of, some) in zip(JUDGES, each, strict=True)
        ],
        [
            [name, *row]
            for name, row in zip(("h2o", "h2o · value prior"), torch.stack(above).mean(0).tolist(), strict=True)
        ],
    )


def _shape(share: Tensor) -> tuple[float, float]:
    """Mean place (0 … 1) of a histogram, and its entropy as a share of the highest."""
    middles = (torch.arange(STRETCHES) + 0.5) / STRETCHES
    return float((share * middles).sum()), float(torch.special.entr(share).sum()) / math.log(STRETCHES)


def _judged(seen: Observation, methods: Sequence[Method], budget: int) -> list[tuple[Tensor, Tensor]]:
    """Per method, each stretch's share of the score; of the tokens kept, and of those among them that were chosen.

    [STRETCHES], [2, STRETCHES]
    """
    tenth = torch.arange(seen.tokens, device=seen.keys.device) * STRETCHES // seen.tokens
    found = []
    for method in methods:
        state = with_token_state(seen, method, budget)
        score = method.scorer(state, budget).mean(0)
        kept = tenth[compress(state, method, budget).index.long()]
        chosen = kept[:, : budget - method.guard.sinks_and_recent(budget)[1]]  # without the guard's recent tokens
        share = torch.zeros(STRETCHES, device=score.device).index_add_(0, tenth, score / score.sum())
        counts = torch.stack([some.flatten().bincount(minlength=STRETCHES) / some.numel() for some in (kept, chosen)])
        found.append((share.cpu(), counts.cpu()))
    return found


def with_token_state(seen: Observation, method: Method, budget: int) -> Observation:
    """The observation of a whole prompt, with this method's state per token."""
    if not method.memory:
        return seen
    token_state = torch.zeros(*seen.keys.shape[:2], method.memory.width, device=seen.keys.device)
    return update_token_state(replace(seen, token_state=token_state), method, budget)


def _passed(seen: Observation, budget: int) -> Tensor:
    """Share of tokens whose score is at least a threshold of the head's highest, without and with the value prior."""
    h2o = parse("h2o")
    plain = h2o.scorer(with_token_state(seen, h2o, budget), budget)
    tokens = token_mask(seen)
    weighted = plain * relative_value_norms(pool(squared_value_norms(seen) * tokens, tokens, 5))
    limits = torch.tensor(THRESHOLDS, device=plain.device)
    normal = torch.stack([score / score.amax(1, keepdim=True) for score in (plain, weighted)])  # [2, kv_heads, n]
    return (normal[..., None] >= limits).float().mean((1, 2)).cpu()


def thirds(layers: Tensor) -> list[Tensor]:
    """Means over the first, the middle and the last layers, and over all. [layers, ..]"""
    parts = (part if len(part) else layers[-1:] for part in layers.tensor_split(3))
    return [part.mean(0) for part in (*parts, layers)]
