"""Several prompts for one engine, written together: from one pool where the method allows it, else side by side."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.cache.report import human
from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.engine.detokenizer import Unfolding
from kvkeep.engine.independent_batch import SideBySide
from kvkeep.engine.row_pool import SHARE, Pool, free_bytes, row_bytes
from kvkeep.engine.sampling import Generation, check_count
from kvkeep.engine.scheduler import Batch, Request
from kvkeep.errors import BadInput, BadParameter
from kvkeep.kernels.torch.quantization import GROUP
from kvkeep.model.chat import ends
from kvkeep.model.hf_cache import key_shape, runs_on

if TYPE_CHECKING:
    from kvkeep.engine.engine import Engine


def together(
    engine: Engine,
    prompts: Sequence[str],
    *,
    question: str | None = None,
    rows: int = 16,
    **options: Any,
) -> list[str]:
    """Answers to all prompts, `rows` of them decoded at a time; options as in `Engine.stream`, but for progress.

    question: asked about every one of them, as in `Engine.stream`
    """
    check_count("rows", rows, 1, "at least one prompt is answered at a time; give a whole number")
    how = Generation.of(options)
    sampling = how.max_new_tokens, how.temperature, how.top_p, how.top_k
    requests = [
        Request(engine.encode(each, question), Unfolding(engine.tokenizer), *sampling) for each in texts(prompts)
    ]
    _raise(_too_long(engine, request) for request in requests)
    if requests and can_batch(engine):
        _pooled(engine, requests, min(rows, len(requests)), how.seed)
    elif requests:
        SideBySide(engine, question, min(rows, len(requests)), how.seed).write(requests)
    _raise(request.refused for request in requests)
    return [request.text for request in requests]


def texts(prompts: Any) -> list[str]:
    """Several prompts, or a refusal of what is none."""
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise BadParameter(f"prompt={reprlib.repr(prompts)} is a {kind}; give a text, or a list of texts.")
    found = list(prompts)
    for number, each in enumerate(found):
        if not isinstance(each, str):
            raise BadParameter(f"prompt {number} of {len(found)} is {reprlib.repr(each)}; give a list of texts.")
    return found


def _raise(wrongs: Iterable[str]) -> None:
    if named := [f"prompt {number}: {wrong}" for number, wrong in enumerate(wrongs) if wrong]:
        raise BadInput("; ".join(named))


def _too_long(engine: Engine, request: Request) -> str:
    try:
        engine.check_length(len(request.ids), request.max_new_tokens)
    except BadInput as error:
        return str(error)
    return ""


def _pooled(engine: Engine, requests: Sequence[Request], rows: int, seed: int) -> None:
    batch = batch_for(engine, requests, rows, seed)
    for request in requests:
        batch.submit(request)
    for _ in batch.run():
        pass


def can_batch(engine: Engine) -> bool:
    """Nothing is fetched, and nothing competes while answers are written."""
    cache = engine.cache
    plain = cache.method.recall is None and cache.method.schedule.every is None
    return plain and len(cache.owned) == len(cache.layers)


def batch_for(engine: Engine, requests: Sequence[Request], rows: int, seed: int = 0) -> Batch:
    """Room for so many sequences at a time, or for as many as fit, each as large as the largest of these."""
    method, (kv_heads, _) = engine.method, key_shape(engine.model)
    lengths = [len(request.ids) for request in requests]
    most = max(min(n, _times(engine) * _kept(engine, n)) for n in lengths)  # a layer may get more than its share
    longest = most if isinstance(method.heads, EqualHeads) else min(max(lengths), most * kv_heads)  # so may a head
    usual = min(most, 2 * max(_kept(engine, n) for n in lengths))
    room, storage = max(request.max_new_tokens for request in requests), engine.cache.storage
    new = max(room, GROUP) if storage else room  # whatever is stored in groups takes one at least
    fit = _that_fit(engine, usual + new)
    rows = min(rows, fit)
    slots = max(rows * (usual + new), min(most + new, fit * (usual + new)))  # who takes far more may wait for others
    pool = Pool(engine.model, rows, kv_heads * slots, longest + room, storage)
    return Batch(engine.model, engine.prefill_sequence, ends(engine.model, engine.tokenizer), pool, seed)


def _that_fit(engine: Engine, tokens: int) -> int:
    """Sequences of so many tokens per key head that the device has room for, with some left to work in."""
    free = free_bytes(runs_on(engine.model))
    if free is None:
        return sys.maxsize
    each = row_bytes(engine.model, tokens, engine.cache.storage)
    if each > SHARE * free:
        raise BadInput(
            f"keys and values of one sequence take {human(each)}, and {human(int(SHARE * free))} of the device's "
            "memory can be used for them; use a smaller budget, fewer new tokens, or storage='int8'."
        )
    return int(SHARE * free // each)


def _times(engine: Engine) -> int:
    """How often a layer may get its share: a pyramid's first at most twice, one that is weighed what all have."""
    layers = engine.method.layers
    return 1 if isinstance(layers, EqualLayers) else len(engine.cache.owned) if layers.weigh else 2


def _kept(engine: Engine, tokens: int) -> int:
    method = engine.method
    return tokens if method.scorer is None else min(tokens, method.tokens(engine.cache.budget, tokens))
