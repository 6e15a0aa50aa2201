"""Every published method, as one choice per axis. A new combination of known parts is one line here."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from kvkeep.arguments import Amount, Cosine, Count, Odd, Positive, Range, Share
from kvkeep.compress.budget.coverage import COVERAGE
from kvkeep.compress.budget.heads import AdaptiveHeads, SharedBudget, Threshold
from kvkeep.compress.budget.layers import CakeLayers, EntropyLayers, Pyramid
from kvkeep.compress.critical import Critical
from kvkeep.compress.grouping import Blocks, Kind, Prototypes
from kvkeep.compress.guard import Guard
from kvkeep.compress.method import Draft, Method, Preset, Schedule
from kvkeep.compress.positions import Capped, Contiguous, Gap
from kvkeep.compress.protocols import Grouping, HeadAllocator, Scorer
from kvkeep.compress.retrieval.chunking import Chunks, Clusters, Events, MethodClusters, SentenceChunks
from kvkeep.compress.retrieval.config import RetrievalConfig
from kvkeep.compress.retrieval.index import Bounds, Centres, EachToken, Representatives
from kvkeep.compress.scorers.ahakv import AhaKVScorer, RecentAttention
from kvkeep.compress.scorers.compactor import ChunkAttention, CompactorScorer
from kvkeep.compress.scorers.expected_attention import ExpectedAttentionScorer, QueryMoments
from kvkeep.compress.scorers.h2o import AccumulatedAttention, H2OScorer
from kvkeep.compress.scorers.intelllm import IntelLLMScorer
from kvkeep.compress.scorers.intentkv import IntentKVScorer
from kvkeep.compress.scorers.key_scores import KeyDiffScorer, KeyNormScorer, LagKVScorer, SatKVScorer
from kvkeep.compress.scorers.order import PromptMark, RandomAnswerScorer, RandomScorer, RecencyScorer
from kvkeep.compress.scorers.repetition import TAU, TAU_OF_NORMS, Repetition, RepetitionScorer, Replay
from kvkeep.compress.scorers.value_norm import ValueNormScorer
from kvkeep.compress.scorers.window import (
    CakeScorer,
    LookaheadScorer,
    NaclScorer,
    ProtoKVScorer,
    RKVScorer,
    SnapKVScorer,
    TovaScorer,
)
from kvkeep.registry import Registry

Size = int | None
Near = Positive | None


def by_window(name: str, scorer: Scorer, window: int, group: Grouping | None = None, **parts: Any) -> Method:
    """A method whose scorer sees the newest queries; their tokens are kept."""
    return Method(name, scorer, Guard(window=window), group, observation_window=window, **parts)


def retrieving(name: str, *parts: Any, **options: Any) -> Method:
    """A method that offloads all tokens, and retrieves some for each window of queries; see `RetrievalConfig`."""
    return Method(name, retrieval=RetrievalConfig(*parts, **options))


def full():
    return Method("full")


def kvkeep(window=32, pool=7, block: Positive = 16, sinks=4, alpha=0.5):
    scorer = ValueNormScorer(SnapKVScorer(window, pool, "max"))
    guard = Guard(sinks, window=window)
    heads = AdaptiveHeads(alpha)
    return Method("kvkeep", scorer, guard, Blocks(block), heads=heads, observation_window=window)


def kvkeep_lookahead(
    tokens=32, window=32, pool=7, block: Positive = 8, sinks=4, alpha=0.5, hold=8, norm=2, predicting=True
):
    method = kvkeep(window, pool, block, sinks, alpha)
    drafting = lookahead(tokens, window, pool, "max", hold, norm, predicting)
    return replace(method, name="kvkeep_lookahead", scorer=ValueNormScorer(drafting.scorer), draft=drafting.draft)


def kvkeep_context(near: Size = None, chunk: Positive = 2048, sinks=4, floor: Share = 0.35, local=True, norm=2):
    method = kvzip_plus(chunk, sinks, near=near, local=local, norm=norm)
    return replace(method, name="kvkeep_context", heads=SharedBudget(floor, yields=True))


def intentkv(
    window=64, block: Positive = 16, smooth=8, intention=True, recent=0, sinks=0, boundary=IntentKVScorer.boundary
):
    scorer = IntentKVScorer(window, smooth, intention, boundary)
    return Method("intentkv", scorer, Guard(sinks, recent), Blocks(block), observation_window=window)


def intelllm(
    head_gravity: Count = 6, near: Count | None = None, gap: Size = None, mode="global", keep_head=True, window=64
):
    guard = Guard(head_gravity if keep_head else 0, near, shrink_to_fit=True)
    scorer = IntelLLMScorer(window, head_gravity, near, mode)
    return Method("intelllm", scorer, guard, placement=Gap(near, gap), observation_window=window)


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
    memory = RecentAttention(recent, value_pool, step_gain, value_prior and not decode_prior, gain, recent_only)
    scorer = AhaKVScorer(pool, value_prior and decode_prior)
    return by_window("ahakv", scorer, recent, memory=memory, schedule=Schedule(1))


def protokv(
    kappa=5,
    anchors=32,
    bits=2,
    chunks: Size = None,
    window: Size = None,
    votes=ProtoKVScorer.votes,
    prototypes: Kind = "both",
    gamma: float | None = None,
    seed=0,
    buckets: Size = None,
    worth="mean",
):
    group = Prototypes(kappa, anchors, bits, chunks, gamma, prototypes, seed, buckets, worth)
    return Method("protokv", ProtoKVScorer(window, votes), Guard(window=window), group, observation_window=window or 32)


def satkv(kappa=5, window: Size = None):
    return Method("satkv", SatKVScorer(kappa), Guard(window=window))


def streamingllm(sinks=4):
    return Method("streamingllm", RecencyScorer(), Guard(sinks, recent=1), placement=Contiguous(), schedule=Schedule(1))


def lm_infinite(sinks=10):
    return Method("lm_infinite", RecencyScorer(), Guard(sinks, recent=1), placement=Capped(), schedule=Schedule(1))


def h2o():
    return Method("h2o", H2OScorer(), Guard(recent=None), memory=AccumulatedAttention(), schedule=Schedule(1))


def tova():
    return Method("tova", TovaScorer(), observation_window=1, schedule=Schedule(1))


def snapkv(window=64, pool=5, pooling="avg"):
    return by_window("snapkv", SnapKVScorer(window, pool, pooling), window)


def lookahead(tokens=8, window=64, pool=5, pooling="avg", hold: Size = None, norm=1, predicting=False):
    draft = Draft(snapkv(window, pool, pooling), tokens, hold, predicting)
    return by_window("lookahead", LookaheadScorer(window, pool, pooling, norm), window, draft=draft)


def pyramidkv(window=8, pool=5, pooling="avg", beta=20):
    return by_window("pyramidkv", SnapKVScorer(window, pool, pooling), window, layers=Pyramid(beta))


def chunkkv(window=32, chunk: Positive = 10, reuse=2):
    return by_window("chunkkv", SnapKVScorer(window, pool=1), window, Blocks(chunk, "chunk"), reuse=reuse)


def nacl(window=32, random=0.7, seed=0):
    return by_window("nacl", NaclScorer(window, random, seed), window)


def cake(window=32, gamma=200.0, pool=5, tau1=1.0, tau2=1.0):
    return by_window("cake", CakeScorer(window, gamma, pool), window, layers=CakeLayers(tau1, tau2, window))


def random(seed=0):
    return Method("random", RandomScorer(seed))


def keep_prompt_random(buffer: Positive = 128, seed=0):
    scorer, schedule = RandomAnswerScorer(seed), Schedule(buffer)
    return Method("keep_prompt_random", scorer, Guard(recent=1), memory=PromptMark(), schedule=schedule)


def knorm():
    return Method("knorm", KeyNormScorer())


def keydiff():
    return Method("keydiff", KeyDiffScorer())


def lagkv(sinks=4, lag=128):
    return Method("lagkv", LagKVScorer(sinks, lag))


def echo(chunk=2048, sinks=4, gap=20, near: Size = None):
    return Method("echo", RepetitionScorer(), Guard(sinks), memory=Repetition(chunk, sinks, gap, near))


def kvzip(chunk: Positive = 2048, sinks=4, layerwise=False, near: Size = None, local=False, norm=0):
    return replayed("kvzip", Replay(chunk, sinks, False, near, local, norm), layerwise)


def kvzip_plus(chunk: Positive = 2048, sinks=4, layerwise=False, near: Size = None, local=False, norm=0):
    return replayed("kvzip_plus", Replay(chunk, sinks, True, near, local, norm), layerwise)


def replayed(name: str, replay: Replay, layerwise: bool):
    """layerwise: heads of one layer share a budget, not those of all layers"""
    heads = SharedBudget(across_layers=not layerwise)
    return Method(name, RepetitionScorer(), Guard(replay.sinks), heads=heads, memory=replay)


def expected_attention(future=512, sinks=4, epsilon: float | None = None, covariance=True, value_norms=True):
    scorer = ExpectedAttentionScorer(future, sinks, epsilon, covariance, value_norms)
    return Method("expected_attention", scorer, Guard(sinks), summary=QueryMoments(sinks))


def compactor(sketch=48, chunk=256, sinks=8, recent=4, seed=0, ridge=0.01):
    scorer = CompactorScorer(sketch, seed, ridge)
    return Method("compactor", scorer, Guard(sinks, recent), memory=ChunkAttention(chunk))


def rkv(buffer: Positive = 128, window=8, pool=7, importance=0.1, alike=0.5):
    return by_window("rkv", RKVScorer(window, pool, importance, alike), window, schedule=Schedule(buffer))


def actqkv(
    window=256,
    sinks: Size = None,
    local: Near = None,
    chunk: Size = None,
    representatives: Positive = 32,
    probe: Literal["bias", "mean"] = "bias",
    density=True,
    per_head=True,
    question_weight: Amount = 0.0,
    reverse=False,
):
    index = Representatives(representatives, True, probe == "bias", True, question_weight, per_head, reverse)
    density = "reverse" if density and reverse else density
    return retrieving("actqkv", Chunks(chunk, 32), index, window, sinks=sinks, near=local, density=density)


def infllm(
    window=256,
    sinks: Size = None,
    local: Near = None,
    block: Near = None,
    representatives: Positive = 4,
    per_head=True,
):
    index = Representatives(representatives, per_head=per_head)
    return retrieving("infllm", Chunks(block, 128), index, window, sinks=sinks, near=local)


def qllm(
    window=256,
    sinks: Size = None,
    local: Near = None,
    block: Near = None,
    representatives: Positive = 4,
    weight=4.0,
    per_head=True,
):
    index = Representatives(representatives, weight=weight, per_head=per_head)
    return retrieving("qllm", Chunks(block, 128), index, window, sinks=sinks, near=local)


def tokenselect(window=256, sinks: Size = None, local: Near = None, similar: Cosine | None = 0.9):
    return retrieving("tokenselect", Chunks(1), EachToken(), window, "contiguous", sinks, local, similar=similar)


def emllm(
    window=256,
    sinks: Size = None,
    local: Near = None,
    gamma=1.0,
    refine=True,
    longest=128,
    contiguity: Annotated[float, Range(0, below=1)] = 0.3,
    representatives: Positive = 4,
    per_head=True,
):
    events, index = Events(gamma, longest, refine=refine), Representatives(representatives, per_head=per_head)
    options = {"sinks": sinks, "near": local, "neighbours": contiguity, "needs": "surprise"}
    return retrieving("emllm", events, index, window, **options)


def quest(page: Near = None, sinks=0, local: Near = None):
    return retrieving("quest", Chunks(page, 16), Bounds(), None, "original", sinks, local, (0, 16))


def clusterkv(
    tokens=80,
    iterations=20,
    sinks: Size = None,
    local: Near = None,
    pack: Size = None,
    once=False,
):
    chunking = Clusters(tokens, pack, iterations)
    return retrieving("clusterkv", chunking, Centres(), None, "original", sinks, local, (16, 128), once=once)


def squeezed(tokens=20, iterations=20, window: Near = None, threshold=0.05, pack: Size = None, once=False):
    chunking = Clusters(tokens, pack, iterations)
    index = Centres(estimate=True, threshold=threshold)
    return retrieving("squeezed", chunking, index, None, "original", 0, window, (0, 100), once=once)


def sentencekv(sinks: Size = None, local: Near = None, longest=128, once=False):
    sizes = sinks, local, (32, 32)
    options = {"needs": "sentences", "once": once}
    return retrieving("sentencekv", SentenceChunks(longest), Centres(), None, "original", *sizes, **options)


def offload_clusters(sinks: Size = None, local: Near = None, pack: Size = None):
    config = RetrievalConfig(Chunks(), Centres(), None, "original", sinks, local, (4, 32))
    return {"retrieval": lambda method: replace(config, chunking=MethodClusters(method.group, pack))}


def keep_sinks(first: Count = 4):
    return lambda method: {"guard": replace(method.guard, sinks=max(first, method.guard.sinks))}


def clustered(
    kappa=5,
    anchors=32,
    bits=2,
    chunks: Size = None,
    gamma: float | None = None,
    seed=0,
    prototypes: Kind = "both",
    buckets: Size = None,
    worth="mean",
):
    return {"group": Prototypes(kappa, anchors, bits, chunks, gamma, prototypes, seed, buckets, worth)}


def weight_by_values(power=1.0, value_pool: Odd = 5):
    return lambda method: {"scorer": ValueNormScorer(method.scorer, power, value_pool)}


def among_heads(heads: HeadAllocator):
    """Heads compete for a budget; a scorer may have another scale for that."""
    return lambda method: {"heads": heads, "scorer": getattr(method.scorer, "among_heads", lambda: method.scorer)()}


def one_budget(floor: Share = 0.0):
    return among_heads(SharedBudget(floor))


def in_blocks(block: Positive = 16):
    return {"group": Blocks(block)}


def keep_above(tau=0.001):
    return lambda method: {"heads": Threshold(method.heads, tau)}


def keep_needed(coverage: float | None = None, tau: float | None = None):
    if coverage is not None or tau is not None:
        return lambda method: {"coverage": coverage, "tau": tau}
    return lambda method: {"tau": method.replay.tau} if method.replay else {"coverage": COVERAGE}


def by_output(share=0.5, offset=1e-4):
    return lambda method: {"rerank": Critical(share, offset)}


GROUPED = "attention is averaged over the query heads of a KV head"
FIRST = "once=True (ProtoKV's table 3, prefilling): the first decoded token retrieves, for all that follow"
REPLAY = (
    "parts are shorter where the context length leaves less room, 64 at most, and stand earlier where positions end "
    "(learned ones; RoPE that changes with length); the template's beginning is scored and evicted like the text (the "
    "authors keep it); a later prompt is repeated by itself; without a tokenizer "
    "(Cache(…, tokenizer=)) the text is fed without the instruction; generated tokens are not scored, and evicted last"
)
REACH = (
    "no key is ever a context length away or farther: what may follow (an eighth of it, 1,024 tokens at most) is "
    "reserved, so a longer text keeps that much less than the context length, whatever the budget"
)
ONCE = "layers are compared once, after all are prefilled, and held uncompressed until then"
SIGN = "equation 5's sign follows the text"
FILLING = (
    "in decode, tokens that wait for their chunk to fill are local ones, and the oldest chunk of these leaves for them"
)
RANGES = "one range of text per 16 tokens, 500 at most (chunks=500: as in the paper)"
METHODS = Registry("method", {
    "full": Preset(full, "", "everything"),
    "kvkeep": Preset(
        kvkeep, "docs/RESULTS.md", "blocks the last queries attend to, weighted by values; head budgets by score",
    ),
    "kvkeep_context": Preset(
        kvkeep_context, "docs/RESULTS.md", "what repeating the text, part by part, needs; one budget for all heads",
        "kvzip_plus, but each part is repeated over itself alone, the 2-norm of all queries' attention to a token is "
        f"its score, and every head keeps .35 of an equal share (not with budget='auto'); {REPLAY}",
    ),
    "kvkeep_lookahead": Preset(
        kvkeep_lookahead, "docs/RESULTS.md", "kvkeep, by what a draft of the answer attends to",
        "unlike lookahead's, the draft of 32 tokens, fewer if the answer ends before, is decoded from the whole "
        "prompt, before anything is evicted; of a prompt longer than eight budgets (hold), from what snapkv keeps of "
        "it in eight budgets; the queries that predict it count, from the prompt's last token on (predicting), by the "
        "2-norm of their attention (norm)",
    ),
    "intentkv": Preset(
        intentkv, "IntentKV", "the blocks that the question, found by a jump of attention, attends to",
        "mean, not sum, over the question's rows; budget left by whole blocks goes to the next block's best tokens; "
        "boundary=subsequent, a variant of ours, compares rows with their neighbours, not with the window's first",
    ),
    "intelllm": Preset(
        intelllm, "IntelLLM", "tokens attended to once the first and last ones are masked, placed at a gap",
        "first tokens are kept (keep_head=False: evicted, as printed); 64 queries score, a number of ours; modes as in "
        f"the text; {REACH}",
    ),
    "ahakv": Preset(
        ahakv, "AhaKV", "tokens recent queries attend to, logits scaled with length, weighted by the values' norm",
        f"scores are not smoothed while decoding; {GROUPED}",
    ),
    "protokv": Preset(
        protokv, "ProtoKV", "whole clusters of keys that the window attends to",
        f"scores are the window's softmax, not its raw logits (votes=raw: as printed); {SIGN}; {RANGES}; {GROUPED}",
    ),
    "satkv": Preset(satkv, "ProtoKV", "keys dissimilar to their neighbours, and the window", SIGN),
    "streamingllm": Preset(
        streamingllm, "arXiv:2309.17453", "first and most recent tokens, made contiguous", REACH,
    ),
    "lm_infinite": Preset(
        lm_infinite, "arXiv:2308.16137", "first and most recent tokens, distances capped at the trained context", REACH,
    ),
    "h2o": Preset(h2o, "arXiv:2306.14048", "half for tokens all queries attended to, half for recent ones", GROUPED),
    "tova": Preset(tova, "arXiv:2401.06104", "tokens the last query attends to, one selection per layer"),
    "snapkv": Preset(
        snapkv, "arXiv:2404.14469", "tokens the last queries attend to, pooled, and those last tokens", GROUPED,
    ),
    "lookahead": Preset(
        lookahead, "arXiv:2505.20334", "tokens that a draft of the answer attends to",
        f"the draft is decoded from what snapkv keeps, and sees the text's tokens alone; {GROUPED}",
    ),
    "pyramidkv": Preset(
        pyramidkv, "arXiv:2406.02069", "snapkv with larger budgets for early layers, smaller for late ones",
        f"the total is conserved exactly; {GROUPED}",
    ),
    "chunkkv": Preset(
        chunkkv, "arXiv:2502.00299", "chunks the last queries attend to; neighbouring layers share the selection",
        f"the last chunk is cut so that the budget is spent exactly; {GROUPED}",
    ),
    "nacl": Preset(
        nacl, "arXiv:2408.03675", "tokens the last queries attend to, and others sampled at random",
        f"the observation window is causal and kept; {GROUPED}",
    ),
    "cake": Preset(
        cake, "arXiv:2503.12491", "tokens of high mean or varying attention; layer budgets by entropy and variance",
        f"{ONCE}; tau 1 and 1, which the authors tune per model; {GROUPED}",
    ),
    "random": Preset(random, "", "tokens drawn at random, of each KV head its own: what any method has to beat"),
    "keep_prompt_random": Preset(
        keep_prompt_random, "", "the prompt, and of the answer tokens drawn at random: what any method has to beat",
        "a floor for long answers, evicting as rkv does; a prompt beyond the budget is drawn from, too, but last",
    ),
    "knorm": Preset(knorm, "arXiv:2406.11430", "keys of small norm", "no layer is exempt"),
    "keydiff": Preset(
        keydiff, "arXiv:2504.15364", "keys unlike the mean direction of their head's keys",
        "evicts after a prefill or a chunk of it, not after every block of 128 tokens",
    ),
    "lagkv": Preset(
        lagkv, "arXiv:2504.04704", "of each 128 tokens, those that stand out on the scale of the next 128",
        "a share of each partition is kept so that the budget is spent exactly",
    ),
    "echo": Preset(
        echo, "after arXiv:2505.23416", "what the text's own queries attend to where a repetition of it would stand",
        "KVzip feeds the text a second time; here the prefill's queries are moved on. Passes of one's own cut a chunk "
        "where they end. Generated tokens are not scored, and evicted last. +shared: one budget, as in the paper",
    ),
    "kvzip": Preset(
        kvzip, "arXiv:2505.23416", "what the model attends to when told to repeat the text, and fed it again", REPLAY,
    ),
    "kvzip_plus": Preset(
        kvzip_plus, "after arXiv:2505.23416", "the same, by what a token adds to the hidden state of the one repeated",
        "attention × ‖W_O v‖ / ‖h‖, h as the layer receives it, before its norm, and ‖h‖ a hundredth of the median at "
        f"least; {REPLAY}",
    ),
    "expected_attention": Preset(
        expected_attention, "arXiv:2510.00636", "keys that the next queries, if distributed as the text's, attend to",
        "epsilon is 0, and .02 where heads compete (+adakv, +shared), as the authors have it",
    ),
    "compactor": Preset(
        compactor, "arXiv:2507.08143", "keys that others cannot stand for, and that their neighbourhood attends to",
        "passes of one's own cut a chunk where they end; generated tokens are not scored, and evicted last",
    ),
    "rkv": Preset(
        rkv, "arXiv:2505.24133", "tokens the last queries attend to, unless the keys of others are like theirs",
        f"evicts whenever 128 tokens more than the budget are held (buffer); {GROUPED}",
    ),
    "actqkv": Preset(
        actqkv, "ActQKV", "everything; chunks are retrieved for an average query weighted by activation bias",
        "statistics per layer and sequence; the question's queries join the window's, the authors' further term has "
        "weight 0 (question_weight); all tokens of a chunk represent it (representatives=4: the paper's number, chosen "
        f"by each query head); one average query per KV head retrieves; {FILLING}; "
        "reverse=True is the ablation of appendix D.3, a query's weight 1 / the sum of its bias",
    ),
    "infllm": Preset(
        infllm, "arXiv:2402.04617", "everything; blocks are retrieved for the mean query of a window",
        "blocks are selected once for all heads; each query head has its own representatives (per_head=False: one "
        f"set); {FILLING}",
    ),
    "qllm": Preset(
        qllm, "arXiv:2406.07528", "everything; blocks are retrieved for the window and, above all, for the question",
        f"the question's queries come from prefilling it alone; {FILLING}",
    ),
    "tokenselect": Preset(
        tokenselect, "arXiv:2411.02886", "everything; tokens are retrieved by attention of all heads, made contiguous",
        "logits are scaled; scores are not smoothed",
    ),
    "emllm": Preset(
        emllm, "arXiv:2407.09450", "everything; events between surprising tokens are retrieved, and their neighbours",
        "text is segmented chunk by chunk, per layer; the buffer of neighbours does not outlive its window",
    ),
    "quest": Preset(
        quest, "arXiv:2406.10774", "everything; pages are retrieved by a bound on their attention, for every token",
        f"no layer is exempt; {GROUPED}; {FILLING}",
    ),
    "clusterkv": Preset(
        clusterkv, "arXiv:2412.03213", "everything; clusters of keys are retrieved by their centre, for every token",
        f"initial centres are equally spaced; no layer is exempt; {GROUPED}; {FIRST}",
    ),
    "squeezed": Preset(
        squeezed, "arXiv:2411.09688", "everything; clusters whose centre passes a threshold are retrieved",
        f"the threshold is relative to uniform attention, within the budget; the authors calibrate one; {FIRST}",
    ),
    "sentencekv": Preset(
        sentencekv, "arXiv:2504.00970", "everything; sentences are retrieved by their mean key, for every token",
        f"nothing is evicted first; the query alone retrieves, not its sentence's mean; {FIRST}",
    ),
}, plugins="kvkeep.methods")  # fmt: skip

MODIFIERS = Registry("modifier", {
    "adakv": Preset(
        lambda alpha=0.2: among_heads(AdaptiveHeads(alpha)), "arXiv:2407.11550", "head budgets by score",
        "units compete by their score; each head's floor is set aside first; the authors' code mixes counts afterwards",
    ),
    "shared": Preset(
        one_budget, "arXiv:2505.23416", "one budget for all heads and layers",
        "for any method's scores; a token that is not among the best of the layers so far is evicted at once",
    ),
    "critical": Preset(
        by_output, "arXiv:2502.03805", "half of the budget by score, the rest by score × ‖W_O v‖₁",
        "of the mean budget of a layer's heads: each head is sure of its share",
    ),
    "threshold": Preset(
        keep_above, "arXiv:2505.23416", "only tokens that score above tau, within the budget",
        "a fixed tau; with units, as many tokens of the best units",
    ),
    "auto": Preset(
        keep_needed, "after arXiv:2505.23416",
        "no more than makes up a share of the scores (.99), or scores above tau, within the budget",
        f"budget='auto' is this, within half of the tokens; tau is {TAU} where the text is fed again, of norms "
        f"{TAU_OF_NORMS}; decided after a prompt or each chunk of it, not in decode",
    ),
    "pyramid": Preset(
        lambda beta=20: {"layers": Pyramid(beta)}, "arXiv:2406.02069", "early layers get larger budgets than late ones",
    ),
    "cake": Preset(
        lambda tau1=1.0, tau2=1.0: {"layers": CakeLayers(tau1, tau2)}, "arXiv:2503.12491",
        "layer budgets by entropy and variance of attention", f"{ONCE}; tau 1 and 1, which the authors tune per model",
    ),
    "entropy": Preset(
        lambda: {"layers": EntropyLayers()}, "ActQKV", "layer budgets by entropy of attention",
        f"the paper's density of chunks, taken here from the window's attention; {ONCE}",
    ),
    "blocks": Preset(in_blocks, "IntentKV", "whole blocks of tokens"),
    "prototypes": Preset(clustered, "ProtoKV", "whole clusters of keys", RANGES),
    "values": Preset(weight_by_values, "AhaKV", "scores are weighted by the norm of the values"),
    "sinks": Preset(keep_sinks, "arXiv:2309.17453", "the first tokens are kept"),
    "recall": Preset(
        offload_clusters, "ProtoKV, table 3", "clusters are offloaded, not evicted, and retrieved for every token",
        "the paper gives no formula: by mean key",
    ),
})  # fmt: skip
