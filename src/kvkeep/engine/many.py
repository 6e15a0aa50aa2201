"""Several prompts for one engine, written together: from one pool where the method allows it, else side by side."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.compress.allocate.heads import EqualHeads
from kvkeep.compress.allocate.layers import EqualLayers
from kvkeep.engine.abreast import Abreast
from kvkeep.engine.batch import Batch, Request
from kvkeep.engine.pool import Pool, free_bytes, row_bytes
from kvkeep.engine.report import human
from kvkeep.engine.sample import Sampler
from kvkeep.engine.words import Unfolding
from kvkeep.errors import BadInput
from kvkeep.kernels.packed import GROUP
from kvkeep.model.adapter import key_shape
from kvkeep.model.prompt import ends

if TYPE_CHECKING:
    from kvkeep.engine.generate import Engine

SHARE = 0.8  # of free memory, for keys and values; passes need the rest


def together(engine: Engine, prompts: Sequence[str], *, rows: int = 16, seed: int = 0, **options: Any) -> list[str]:
    """Answers to all prompts, so many of them written at a time; options: max_new_tokens, temperature, top_p."""
    requests = [Request(engine.encode(prompt), Unfolding(engine.tokenizer), **options) for prompt in prompts]
    for request in requests:
        try:
            engine.check_length(len(request.ids), request.max_new_tokens)
        except BadInput as error:
            request.refuse(error)
    if able := [request for request in requests if not request.refused]:
        (_pooled if can_batch(engine) else _side_by_side)(engine, able, min(rows, len(able)), seed)
    if refused := [f"prompt {n}: {each.refused}" for n, each in enumerate(requests) if each.refused]:
        raise BadInput("; ".join(refused))
    return [request.text for request in requests]


def _pooled(engine: Engine, requests: Sequence[Request], rows: int, seed: int) -> None:
    batch = batch_for(engine, requests, rows, seed)
    for request in requests:
        batch.submit(request)
    for _ in batch.run():
        pass


def _side_by_side(engine: Engine, requests: Sequence[Request], rows: int, seed: int) -> None:
    """Each is written as it would be alone, by an engine of its own."""
    waiting, last, abreast = deque(requests), ends(engine.model, engine.tokenizer), Abreast(engine.model)
    if engine.method.recall:
        rows = min(rows, _at_home(engine, max(len(request.ids) for request in requests)))
    at_work: list[tuple[Request, Engine, Sampler]] = []
    logits: list[Tensor] = []
    while waiting or at_work:
        while waiting and len(at_work) < rows:
            request, twin = waiting.popleft(), engine.apart()
            try:
                logits.append(twin.read(request.ids))
            except torch.OutOfMemoryError as error:
                request.refuse(error)
            else:
                at_work.append((request, twin, Sampler(request.temperature, request.top_p, seed)))
        for (request, _, sampler), after in zip(at_work, logits, strict=True):
            request.add(sampler(after), last)
        at_work = [each for each in at_work if not each[0].done]
        if at_work:
            abreast.engines = [twin for _, twin, _ in at_work]
            logits = list(abreast.feed(torch.tensor([request.words.ids[-1:] for request, *_ in at_work]))[:, -1])
        else:
            logits = []


def can_batch(engine: Engine) -> bool:
    """Nothing is fetched, and nothing competes while answers are written."""
    cache = engine.cache
    plain = cache.method.recall is None and cache.method.schedule.every is None
    return plain and len(cache.owned) == len(cache.layers)


def batch_for(engine: Engine, requests: Sequence[Request], rows: int, seed: int = 0) -> Batch:
    """Room for so many sequences at a time, or for as many as fit, each as large as the largest of these."""
    method, (kv_heads, _) = engine.method, key_shape(engine.model)
    kept = max(_kept(engine, len(request.ids)) for request in requests)
    if not isinstance(method.layers, EqualLayers):
        kept *= 2  # a layer may get more than its share
    room = max(request.max_new_tokens for request in requests)
    longest = kept if isinstance(method.heads, EqualHeads) else kept * kv_heads  # so may a head
    storage = engine.cache.storage
    slots = kept + (max(room, GROUP) if storage else room)  # whatever is stored in groups takes one at least
    rows = min(rows, _that_fit(engine, slots))
    pool = Pool(engine.model, rows, rows * kv_heads * slots, longest + room, storage)
    return Batch(engine.model, engine.read_alone, ends(engine.model, engine.tokenizer), pool, seed)


def _that_fit(engine: Engine, tokens: int) -> int:
    """Sequences of so many tokens per key head that the device has room for, with some left to work in."""
    free = free_bytes(engine.model.device)
    if free is None:
        return sys.maxsize
    each = row_bytes(engine.model, tokens, engine.cache.storage)
    if each > SHARE * free:
        raise BadInput(
            f"keys and values of one sequence take {human(each)}, and {human(int(SHARE * free))} of the device's "
            "memory can be used for them; use a smaller budget, fewer new tokens, or storage='int8'."
        )
    return int(SHARE * free // each)


def _at_home(engine: Engine, tokens: int) -> int:
    """Sequences of so many tokens that the host can hold, where nothing is dropped; one is always tried."""
    if not hasattr(os, "sysconf"):  # not everywhere is it told
        return sys.maxsize
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, int(SHARE * free // row_bytes(engine.model, tokens)))


def _kept(engine: Engine, tokens: int) -> int:
    method = engine.method
    return tokens if method.scorer is None else min(tokens, method.tokens(engine.cache.budget, tokens))
