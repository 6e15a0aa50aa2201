"""Every published method, as one choice per axis. A new crossing of known parts is one line here."""

from __future__ import annotations

from dataclasses import replace

from kvkeep.compress.budget.heads import AdaptiveHeads
from kvkeep.compress.budget.layers import CakeLayers, EntropyLayers, Pyramid
from kvkeep.compress.grouping.blocks import Blocks
from kvkeep.compress.grouping.prototypes import Prototypes
from kvkeep.compress.guard import Guard
from kvkeep.compress.method import Method, Named
from kvkeep.compress.positions import Capped, Contiguous, Gap
from kvkeep.compress.retrieval.chunking import Chunks, Clusters, Events, Grouped, Marked
from kvkeep.compress.retrieval.config import Recall, check_probe
from kvkeep.compress.retrieval.index import Bounds, Centres, EachToken, Representatives
from kvkeep.compress.schedule import Schedule
from kvkeep.compress.scorers.ahakv import Aha, RecentVotes
from kvkeep.compress.scorers.cake import MeanAndVariance
from kvkeep.compress.scorers.h2o import Accumulate, Mass
from kvkeep.compress.scorers.intelllm import WithoutGravity
from kvkeep.compress.scorers.intentkv import Intent
from kvkeep.compress.scorers.nacl import VotesAndLuck
from kvkeep.compress.scorers.protokv import WindowLogits
from kvkeep.compress.scorers.recency import Recency
from kvkeep.compress.scorers.satkv import Outliers
from kvkeep.compress.scorers.snapkv import LastVote, Votes
from kvkeep.compress.scorers.value_norm import ByValue
from kvkeep.registry import Registry


def full():
    return Method("full", scorer=None)


def kvkeep(window=32, pool=7, block=16, sinks=4, alpha=0.5):
    scorer = ByValue(Votes(window, pool, "max"))
    return Method(
        "kvkeep", scorer, Guard(sinks, window=window), Blocks(block), heads=AdaptiveHeads(alpha), voters=window
    )


def intentkv(window=64, block=16, smooth=8, intention=True, recent=0, sinks=0, boundary=Intent.boundary):
    scorer = Intent(window, smooth, intention, boundary)
    return Method("intentkv", scorer, Guard(sinks, recent), Blocks(block), voters=window)


def intelllm(head_gravity=6, near: int | None = None, gap: int | None = None, mode="global", keep_head=True, window=64):
    guard = Guard(head_gravity if keep_head else 0, near, yields=True)
    return Method(
        "intelllm", WithoutGravity(window, head_gravity, near, mode), guard, place=Gap(near, gap), voters=window
    )


def ahakv(
    recent=32,
    pool=5,
    value_pool=5,
    step_gain=True,
    value_prior=True,
    decode_prior=False,
    gain="replace",
    recent_only=True,
):
    memory = RecentVotes(recent, value_pool, step_gain, value_prior and not decode_prior, gain, recent_only)
    scorer = Aha(pool, value_prior and decode_prior)
    return Method("ahakv", scorer, Guard(window=recent), memory=memory, voters=recent, schedule=Schedule(1))


def protokv(
    kappa=5,
    anchors=32,
    bits=2,
    chunks: int | None = None,
    window: int | None = None,
    votes=WindowLogits.votes,
    prototypes="both",
    gamma: float | None = None,
    seed=0,
    buckets: int | None = None,
    worth="mean",
):
    group = Prototypes(kappa, anchors, bits, chunks, gamma, prototypes, seed, buckets, worth)
    return Method("protokv", WindowLogits(window, votes), Guard(window=window), group, voters=window or 32)


def satkv(kappa=5, window: int | None = None):
    return Method("satkv", Outliers(kappa), Guard(window=window))


def streamingllm(sinks=4):
    return Method("streamingllm", Recency(), Guard(sinks, recent=1), place=Contiguous(), schedule=Schedule(1))


def lm_infinite(sinks=10):
    return Method("lm_infinite", Recency(), Guard(sinks, recent=1), place=Capped(), schedule=Schedule(1))


def h2o():
    return Method("h2o", Mass(), Guard(recent=None), memory=Accumulate(), schedule=Schedule(1))


def tova():
    return Method("tova", LastVote(), voters=1, schedule=Schedule(1))


def snapkv(window=64, pool=5, pooling="avg"):
    return Method("snapkv", Votes(window, pool, pooling), Guard(window=window), voters=window)


def pyramidkv(window=8, pool=5, pooling="avg", beta=20):
    return Method("pyramidkv", Votes(window, pool, pooling), Guard(window=window), layers=Pyramid(beta), voters=window)


def chunkkv(window=32, chunk=10, reuse=2):
    return Method(
        "chunkkv", Votes(window, pool=1), Guard(window=window), Blocks(chunk, "chunk"), voters=window, reuse=reuse
    )


def nacl(window=32, random=0.7, seed=0):
    return Method("nacl", VotesAndLuck(window, random, seed), Guard(window=window), voters=window)


def cake(window=32, gamma=200.0, pool=5, tau1=1.0, tau2=1.0):
    scorer = MeanAndVariance(window, gamma, pool)
    return Method("cake", scorer, Guard(window=window), layers=CakeLayers(tau1, tau2, window), voters=window)


def actqkv(
    window=256,
    sinks: int | None = None,
    local: int | None = None,
    chunk: int | None = None,
    representatives=32,
    probe="bias",
    density=True,
    per_head=True,
    question_weight=0.0,
    reverse=False,
):
    check_probe(probe)
    index = Representatives(representatives, True, probe == "bias", True, question_weight, per_head, reverse)
    shared = "reverse" if density and reverse else density
    return Method(
        "actqkv", None, recall=Recall(Chunks(chunk, 32), index, window, sinks=sinks, near=local, density=shared)
    )


def infllm(
    window=256,
    sinks: int | None = None,
    local: int | None = None,
    block: int | None = None,
    representatives=4,
    per_head=True,
):
    index = Representatives(representatives, per_head=per_head)
    return Method("infllm", None, recall=Recall(Chunks(block, 128), index, window, sinks=sinks, near=local))


def qllm(
    window=256,
    sinks: int | None = None,
    local: int | None = None,
    block: int | None = None,
    representatives=4,
    weight=4.0,
    per_head=True,
):
    index = Representatives(representatives, weight=weight, per_head=per_head)
    return Method("qllm", None, recall=Recall(Chunks(block, 128), index, window, sinks=sinks, near=local))


def tokenselect(window=256, sinks: int | None = None, local: int | None = None, similar=0.9):
    recall = Recall(Chunks(1), EachToken(), window, "side by side", sinks, local, similar=similar)
    return Method("tokenselect", None, recall=recall)


def emllm(
    window=256,
    sinks: int | None = None,
    local: int | None = None,
    gamma=1.0,
    refine=True,
    longest=128,
    contiguity=0.3,
    representatives=4,
    per_head=True,
):
    events, index = Events(gamma, longest, refine=refine), Representatives(representatives, per_head=per_head)
    recall = Recall(events, index, window, sinks=sinks, near=local, neighbours=contiguity, needs="surprise")
    return Method("emllm", None, recall=recall)


def quest(page: int | None = None, sinks=0, local: int | None = None):
    return Method("quest", None, recall=Recall(Chunks(page, 16), Bounds(), None, "true", sinks, local, usual=(0, 16)))


def clusterkv(
    tokens=80, iterations=20, sinks: int | None = None, local: int | None = None, pack: int | None = None, once=False
):
    cut = Clusters(tokens, pack, iterations)
    recall = Recall(cut, Centres(), None, "true", sinks, local, usual=(16, 128), once=once)
    return Method("clusterkv", None, recall=recall)


def squeezed(tokens=20, iterations=20, window: int | None = None, threshold=0.05, pack: int | None = None, once=False):
    cut, index = Clusters(tokens, pack, iterations), Centres(estimate=True, threshold=threshold)
    recall = Recall(cut, index, None, "true", 0, window, usual=(0, 100), once=once)
    return Method("squeezed", None, recall=recall)


def sentencekv(sinks: int | None = None, local: int | None = None, longest=128, once=False):
    recall = Recall(
        Marked(longest), Centres(), None, "true", sinks, local, usual=(32, 32), needs="sentences", once=once
    )
    return Method("sentencekv", None, recall=recall)


def recalled(sinks: int | None = None, local: int | None = None, pack: int | None = None):
    """Clusters of keys put away instead of dropped, and fetched whole."""
    return lambda method: Recall(Grouped(method.group, pack), Centres(), None, "true", sinks, local, usual=(4, 32))


def first_kept(first=4):
    """The first tokens stay, whatever the votes say."""
    return lambda method: {"guard": replace(method.guard, sinks=max(first, method.guard.sinks))}


def clustered(
    kappa=5, anchors=32, bits=2, chunks=None, gamma=None, seed=0, prototypes="both", buckets=None, worth="mean"
):
    """Whole clusters of keys instead of tokens or blocks."""
    return {"group": Prototypes(kappa, anchors, bits, chunks, gamma, prototypes, seed, buckets, worth)}


def by_value(power=1.0, value_pool=5):
    """Votes count more for tokens with large values."""
    return lambda method: {"scorer": ByValue(method.scorer, power, value_pool)}


GROUPED = "the query heads of a key head vote with their average"
FIRST = "once=True (ProtoKV's table 3, prefilling): the first token written decides what stays, all after it stays"
ONCE = "layers are compared once, when all are read, and held whole until then"
SIGN = "equation 5's sign follows the text"
RANGES = "a range of text for every 16 tokens, 500 at most (chunks=500: as the paper's)"
METHODS = Registry("method", {
    "full": Named(full, "", "everything"),
    "kvkeep": Named(
        kvkeep, "docs/RESULTS.md", "blocks the last queries attend to, weighted by values, shared among heads by score",
    ),
    "intentkv": Named(
        intentkv, "IntentKV", "the blocks that the question, found by a jump of attention, attends to",
        "rows are compared with their neighbours (boundary=first: with the window's first, as the formula has it); "
        "mean, not sum, over the question's rows; budget left by whole blocks goes to the next block's best tokens",
    ),
    "intelllm": Named(
        intelllm, "IntelLLM", "what is attended to once first and last tokens are hidden, placed at a gap",
        "first tokens stay (keep_head=False evicts them, as printed); 64 queries vote, not one; modes as in the text",
    ),
    "ahakv": Named(
        ahakv, "AhaKV", "what recent queries attend to, sharpened with length, weighted by the values' size",
        f"while decoding scores are not smoothed; {GROUPED}",
    ),
    "protokv": Named(
        protokv, "ProtoKV", "whole clusters of keys, those that the window attends to",
        f"the window's softmax votes, not its raw logits (votes=raw: as printed); {SIGN}; {RANGES}; {GROUPED}",
    ),
    "satkv": Named(satkv, "ProtoKV", "keys unlike their neighbours, and the window", SIGN),
    "streamingllm": Named(streamingllm, "arXiv:2309.17453", "the first tokens and the most recent ones, side by side"),
    "lm_infinite": Named(
        lm_infinite, "arXiv:2308.16137", "the first tokens and the most recent ones, distances capped at the window",
    ),
    "h2o": Named(h2o, "arXiv:2306.14048", "half for what all queries attended to, half for the most recent", GROUPED),
    "tova": Named(tova, "arXiv:2401.06104", "what the last query attends to, one choice per layer"),
    "snapkv": Named(
        snapkv, "arXiv:2404.14469", "what the last queries attend to, smoothed, and those last tokens", GROUPED,
    ),
    "pyramidkv": Named(
        pyramidkv, "arXiv:2406.02069", "snapkv with more for early layers, less for late ones",
        f"the total is conserved exactly; {GROUPED}",
    ),
    "chunkkv": Named(
        chunkkv, "arXiv:2502.00299", "chunks the last queries attend to; neighbouring layers share the choice",
        f"the last chunk is cut so that the budget is spent exactly; {GROUPED}",
    ),
    "nacl": Named(
        nacl, "arXiv:2408.03675", "tokens the last queries attend to, and others drawn at random",
        f"voters are causal and all kept; {GROUPED}",
    ),
    "cake": Named(
        cake, "arXiv:2503.12491", "what the window attends to, always or at times; layers share by its entropy",
        f"{ONCE}; tau 1 and 1, which the authors tune per model; {GROUPED}",
    ),
    "actqkv": Named(
        actqkv, "ActQKV", "everything; chunks are fetched for a probe of surprising queries",
        "statistics per layer and sequence; the question's queries join the window's, the authors' further term has "
        "weight 0 (question_weight); all tokens of a chunk represent it (representatives=4: the paper's number, chosen "
        "by each query head); one probe per key head asks; "
        "reverse=True is the ablation of appendix D.3, a query's weight 1 / the sum of its bias",
    ),
    "infllm": Named(
        infllm, "arXiv:2402.04617", "everything; blocks are fetched for the mean query of a window",
        "blocks are one choice for all heads; every query head chooses its representatives (per_head=False: one set)",
    ),
    "qllm": Named(
        qllm, "arXiv:2406.07528", "everything; blocks are fetched for the window and, above all, for the question",
        "the question's queries come from reading it alone",
    ),
    "tokenselect": Named(
        tokenselect, "arXiv:2411.02886", "everything; tokens are fetched by the votes of all heads, side by side",
        "logits are scaled; scores are not smoothed",
    ),
    "emllm": Named(
        emllm, "arXiv:2407.09450", "everything; events between surprises are fetched, and those beside them",
        "text is cut in pieces, layer by layer; the buffer of neighbours does not outlive its window",
    ),
    "quest": Named(
        quest, "arXiv:2406.10774", "everything; pages are fetched by a bound on their attention, for every token",
        f"no layer is exempt; {GROUPED}",
    ),
    "clusterkv": Named(
        clusterkv, "arXiv:2412.03213", "everything; clusters of keys are fetched by their centre, for every token",
        f"first centres lie at equal distances; no layer is exempt; {GROUPED}; {FIRST}",
    ),
    "squeezed": Named(
        squeezed, "arXiv:2411.09688", "everything; clusters whose centre passes a threshold are fetched",
        f"the threshold is a share of even attention, within the budget; the authors calibrate one; {FIRST}",
    ),
    "sentencekv": Named(
        sentencekv, "arXiv:2504.00970", "everything; sentences are fetched by their mean key, for every token",
        f"nothing is dropped first; the query alone asks, not its sentence's mean; {FIRST}",
    ),
})  # fmt: skip

CROSSINGS = Registry("crossing", {
    "adakv": Named(
        lambda alpha=0.2: {"heads": AdaptiveHeads(alpha)}, "arXiv:2407.11550", "heads share a layer's budget by score",
        "units compete by their worth; each head's floor is set aside first; the authors' code mixes counts afterwards",
    ),
    "pyramid": Named(
        lambda beta=20: {"layers": Pyramid(beta)}, "arXiv:2406.02069", "early layers get more than late ones",
    ),
    "cake": Named(
        lambda tau1=1.0, tau2=1.0: {"layers": CakeLayers(tau1, tau2)}, "arXiv:2503.12491",
        "layers share by entropy and variance of attention", f"{ONCE}; tau 1 and 1, which the authors tune per model",
    ),
    "entropy": Named(
        lambda: {"layers": EntropyLayers()}, "ActQKV", "layers share by entropy of attention",
        f"the paper's density of chunks, read here from the window's attention; {ONCE}",
    ),
    "blocks": Named(lambda block=16: {"group": Blocks(block)}, "IntentKV", "whole blocks of tokens"),
    "prototypes": Named(clustered, "ProtoKV", "whole clusters of keys", RANGES),
    "values": Named(by_value, "AhaKV", "votes are weighted by the size of the values"),
    "sinks": Named(first_kept, "arXiv:2309.17453", "the first tokens stay"),
    "recall": Named(
        lambda sinks=None, local=None, pack=None: {"recall": recalled(sinks, local, pack)}, "ProtoKV, table 3",
        "clusters are put away, not dropped, and fetched for every token", "the paper gives no formula: by mean key",
    ),
})  # fmt: skip
