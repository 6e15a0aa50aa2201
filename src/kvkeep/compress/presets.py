"""Every published method, as one choice per axis. A new crossing of known parts is one line here."""

from __future__ import annotations

from kvkeep.compress.allocate.heads import AdaptiveHeads
from kvkeep.compress.allocate.layers import Pyramid
from kvkeep.compress.group.blocks import Blocks
from kvkeep.compress.method import Method, Named
from kvkeep.compress.score.intent import Intent
from kvkeep.compress.score.recency import Recency
from kvkeep.compress.score.votes import Votes
from kvkeep.compress.window import Guard
from kvkeep.registry import Registry


def full() -> Method:
    return Method("full", scorer=None)


def streamingllm(sinks: int = 4) -> Method:
    return Method("streamingllm", Recency(), Guard(sinks=sinks, recent=1))


def snapkv(window: int = 64, pool: int = 5, pooling: str = "avg") -> Method:
    return Method("snapkv", Votes(window, pool, pooling), Guard(window=window), voters=window)


def tova() -> Method:
    return Method("tova", Votes(1, pool=1, kept=False, one_choice=True), voters=1)


def intentkv(window: int = 64, block: int = 16, smooth: int = 8, intention: bool = True, recent: int = 0, sinks: int = 0) -> Method:
    return Method("intentkv", Intent(window, smooth, intention), Guard(sinks, recent), Blocks(block), voters=window)


METHODS = Registry("method", {
    "full": Named(full, "", "everything"),
    "streamingllm": Named(streamingllm, "arXiv:2309.17453", "the first tokens and the most recent ones"),
    "snapkv": Named(snapkv, "arXiv:2404.14469", "what the last queries attend to, smoothed, and those last tokens"),
    "tova": Named(tova, "arXiv:2401.06104", "what the last query attends to, one choice per layer"),
    "intentkv": Named(intentkv, "IntentKV", "the blocks that the question, found by a jump of attention, attends to"),
})  # fmt: skip

CROSSINGS = Registry("crossing", {
    "adakv": Named(lambda alpha=0.2: {"heads": AdaptiveHeads(alpha)}, "arXiv:2407.11550", "heads share a layer's budget by score"),
    "pyramid": Named(lambda beta=20: {"layers": Pyramid(beta)}, "arXiv:2406.02069", "early layers get more than late ones"),
})  # fmt: skip
