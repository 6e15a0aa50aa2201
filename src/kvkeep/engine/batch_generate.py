"""Several prompts as one batch: over a `RowPool` where the method allows it, else over caches of their own."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.cache.report import format_bytes
from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.engine.detokenizer import IncrementalDetokenizer
from kvkeep.engine.independent_batch import IndependentScheduler
from kvkeep.engine.row_pool import MEMORY_FRACTION, RowPool, free_device_bytes, row_bytes
from kvkeep.engine.sampling import Generation, check_count
from kvkeep.engine.scheduler import Request, Scheduler
from kvkeep.errors import BadInput, BadParameter
from kvkeep.kernels.torch.quantization import GROUP_SIZE
from kvkeep.model.chat import eos_token_ids
from kvkeep.model.hf_cache import execution_device, key_shape

if TYPE_CHECKING:
    from kvkeep.engine.engine import Engine


def generate_batch(
    engine: Engine,
    prompts: Sequence[str],
    *,
    question: str | None = None,
    rows: int = 16,
    **options: Any,
) -> list[str]:
    """Answers to all prompts, `rows` of them decoded at a time; options as in `Engine.stream`, except progress.

    question: asked about every prompt, as in `Engine.stream`
    """
    check_count("rows", rows, 1, "at least one prompt is answered at a time; give a whole number")
    how = Generation.of(options)
    sampling = how.max_new_tokens, how.temperature, how.top_p, how.top_k
    requests = [
        Request(engine.encode(prompt, question), IncrementalDetokenizer(engine.tokenizer), *sampling)
        for prompt in check_prompts(prompts)
    ]
    _raise(_too_long(engine, request) for request in requests)
    if requests and can_pool(engine):
        _generate_pooled(engine, requests, min(rows, len(requests)), how.seed)
    elif requests:
        IndependentScheduler(engine, question, min(rows, len(requests)), how.seed).run(requests)
    _raise(request.error for request in requests)
    return [request.text for request in requests]


def check_prompts(prompts: Any) -> list[str]:
    """Refuse what is not a list of texts."""
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise BadParameter(f"prompt={reprlib.repr(prompts)} is a {kind}; give a text, or a list of texts.")
    found = list(prompts)
    for number, each in enumerate(found):
        if not isinstance(each, str):
            raise BadParameter(f"prompt {number} of {len(found)} is {reprlib.repr(each)}; give a list of texts.")
    return found


def _raise(errors: Iterable[str]) -> None:
    if numbered := [f"prompt {number}: {error}" for number, error in enumerate(errors) if error]:
        raise BadInput("; ".join(numbered))


def _too_long(engine: Engine, request: Request) -> str:
    try:
        engine.check_length(len(request.ids), request.max_new_tokens)
    except BadInput as error:
        return str(error)
    return ""


def _generate_pooled(engine: Engine, requests: Sequence[Request], rows: int, seed: int) -> None:
    scheduler = make_scheduler(engine, requests, rows, seed)
    for request in requests:
        scheduler.submit(request)
    for _ in scheduler.run():
        pass


def can_pool(engine: Engine) -> bool:
    """Nothing is retrieved or evicted while answers are decoded, and every layer is compressed."""
    cache = engine.cache
    appends_only = cache.method.retrieval is None and cache.method.schedule.every is None
    return appends_only and len(cache.compressed_layers) == len(cache.layers)


def make_scheduler(engine: Engine, requests: Sequence[Request], rows: int, seed: int = 0) -> Scheduler:
    """A pool for `rows` sequences, or as many as fit, each as large as the largest of these requests."""
    method, (kv_heads, _) = engine.method, key_shape(engine.model)
    lengths = [len(request.ids) for request in requests]
    max_kept = max(min(n, _max_layer_factor(engine) * _kept(engine, n)) for n in lengths)  # layer budgets may differ
    longest = max_kept if isinstance(method.heads, EqualHeads) else min(max(lengths), max_kept * kv_heads)  # heads too
    usual = min(max_kept, 2 * max(_kept(engine, n) for n in lengths))
    room, storage = max(request.max_new_tokens for request in requests), engine.cache.storage
    new = max(room, GROUP_SIZE) if storage else room  # quantized storage takes one group at least
    fit = _rows_that_fit(engine, usual + new)
    rows = min(rows, fit)
    slots = max(rows * (usual + new), min(max_kept + new, fit * (usual + new)))  # a larger request waits for others
    pool = RowPool(engine.model, rows, kv_heads * slots, longest + room, storage)
    eos = eos_token_ids(engine.model, engine.tokenizer)
    return Scheduler(engine.model, engine.prefill_sequence, eos, pool, seed)


def _rows_that_fit(engine: Engine, tokens: int) -> int:
    """How many sequences of so many tokens per key head fit into the device's free memory."""
    free = free_device_bytes(execution_device(engine.model))
    if free is None:
        return sys.maxsize
    usable, each = MEMORY_FRACTION * free, row_bytes(engine.model, tokens, engine.cache.storage)
    if each > usable:
        raise BadInput(
            f"keys and values of one sequence take {format_bytes(each)}, and {format_bytes(int(usable))} of the "
            "device's memory can be used for them; use a smaller budget, fewer new tokens, or storage='int8'."
        )
    return int(usable // each)


def _max_layer_factor(engine: Engine) -> int:
    """The most a layer may get of the mean budget: a pyramid's first twice, a weighted one all layers' budgets."""
    layers = engine.method.layers
    if isinstance(layers, EqualLayers):
        return 1
    return len(engine.cache.compressed_layers) if layers.layer_weight else 2


def _kept(engine: Engine, tokens: int) -> int:
    method = engine.method
    return tokens if method.scorer is None else min(tokens, method.tokens(engine.cache.budget, tokens))
