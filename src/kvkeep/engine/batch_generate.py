"""Several prompts as one batch: over a `RowPool` where the method allows it, else over caches of their own."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kvkeep.cache.report import format_bytes
from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.engine.detokenizer import IncrementalDetokenizer
from kvkeep.engine.independent_batch import IndependentScheduler
from kvkeep.engine.row_pool import MEMORY_FRACTION, RowPool, free_device_bytes, row_bytes
from kvkeep.engine.sampling import Generation, check_count
from kvkeep.engine.scheduler import Request, Scheduler
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadInput, BadParameter
from kvkeep.kernels.torch.quantization import GROUP_SIZE
from kvkeep.model.chat import encode, eos_token_ids, with_question
from kvkeep.model.hf_cache import execution_device, key_shape


def generate_batch(
    like: Sequence,
    prompts: Iterable[str],
    *,
    question: str | None = None,
    rows: int = 16,
    **options: Any,
) -> list[str]:
    """Answers to all prompts, `rows` of them decoded at a time; options as in `Engine.stream`, except progress.

    like: one of the same configuration, which stays as it is; question: asked about every prompt
    """
    config = like.config
    check_count("rows", rows, 1, "at least one prompt is answered at a time; give a whole number")
    how = Generation.of(options)
    sampling = how.max_new_tokens, how.temperature, how.top_p, how.top_k
    requests = [
        Request(_encode(config, prompt, question), IncrementalDetokenizer(config.tokenizer), *sampling)
        for prompt in check_prompts(prompts)
    ]
    _raise(_too_long(config, request) for request in requests)
    if requests and can_pool(like):
        _generate_pooled(like, requests, min(rows, len(requests)), how.seed)
    elif requests:
        IndependentScheduler(config, question, min(rows, len(requests)), how.seed).run(requests)
    _raise(request.error for request in requests)
    return [request.text for request in requests]


def _encode(config: SequenceConfig, prompt: str, question: str | None) -> Tensor:
    return encode(config.tokenizer, with_question(prompt, question))[0]


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


def _too_long(config: SequenceConfig, request: Request) -> str:
    try:
        config.check_length(len(request.ids), request.max_new_tokens)
    except BadInput as error:
        return str(error)
    return ""


def _generate_pooled(like: Sequence, requests: list[Request], rows: int, seed: int) -> None:
    scheduler = make_scheduler(like, requests, rows, seed)
    for request in requests:
        scheduler.submit(request)
    for _ in scheduler.run():
        pass


def can_pool(like: Sequence) -> bool:
    """Nothing is retrieved or evicted while answers are decoded, and every layer is compressed."""
    cache = like.cache
    appends_only = cache.method.retrieval is None and cache.method.schedule.every is None
    return appends_only and len(cache.compressed_layers) == len(cache.layers)


def make_scheduler(like: Sequence, requests: list[Request], rows: int, seed: int = 0) -> Scheduler:
    """A pool for `rows` sequences, or as many as fit, each as large as the largest of these requests."""
    config, method, (kv_heads, _) = like.config, like.config.method, key_shape(like.config.model)
    lengths = [len(request.ids) for request in requests]
    max_kept = max(min(n, _max_layer_factor(like) * _kept(like, n)) for n in lengths)  # layer budgets may differ
    longest = max_kept if isinstance(method.heads, EqualHeads) else min(max(lengths), max_kept * kv_heads)  # heads too
    usual = min(max_kept, 2 * max(_kept(like, n) for n in lengths))
    room, storage = max(request.max_new_tokens for request in requests), like.cache.storage
    new = max(room, GROUP_SIZE) if storage else room  # quantized storage takes one group at least
    fit = _rows_that_fit(like, usual + new)
    rows = min(rows, fit)
    slots = max(rows * (usual + new), min(max_kept + new, fit * (usual + new)))  # a larger request waits for others
    pool = RowPool(config.model, rows, kv_heads * slots, longest + room, storage)
    eos = eos_token_ids(config.model, config.tokenizer)
    return Scheduler(config.model, config.prefill_sequence, eos, pool, seed)


def _rows_that_fit(like: Sequence, tokens: int) -> int:
    """How many sequences of so many tokens per key head fit into the device's free memory."""
    free = free_device_bytes(execution_device(like.config.model))
    if free is None:
        return sys.maxsize
    usable, each = MEMORY_FRACTION * free, row_bytes(like.config.model, tokens, like.cache.storage)
    if each > usable:
        raise BadInput(
            f"keys and values of one sequence take {format_bytes(each)}, and {format_bytes(int(usable))} of the "
            "device's memory can be used for them; use a smaller budget, fewer new tokens, or storage='int8'."
        )
    return int(usable // each)


def _max_layer_factor(like: Sequence) -> int:
    """The most a layer may get of the mean budget: a pyramid's first twice, a weighted one all layers' budgets."""
    layers = like.config.method.layers
    if isinstance(layers, EqualLayers):
        return 1
    return len(like.cache.compressed_layers) if layers.layer_weight else 2


def _kept(like: Sequence, tokens: int) -> int:
    method = like.config.method
    return tokens if method.scorer is None else min(tokens, like.cache.backend.budget.tokens(tokens))
