"""The table of kernels: every function with a Triton kernel, under one name.

Triton's implementation runs on a GPU, torch's elsewhere. A kernel that is missing or fails is reported once; torch's
implementation takes over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.torch import (
    elementwise,
    fp8,
    quantization,
    ranking,
    reference,
    retrieval_units,
    scoring,
    slotted,
    votes,
)

NO_SWITCH = nullcontext()
TWO_PASSES = 2**26  # queries × held keys that are worth a cuDNN plan of their own shape
FLOATS = torch.float32, torch.float16, torch.bfloat16


def on_device(device: torch.device) -> AbstractContextManager:
    """Triton launches kernels on the current device, which need not be the one a layer of a sharded model is on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return NO_SWITCH
    return torch.cuda.device(device)


class Kernel:
    """A function of kernels/triton, imported on first use; raises what a missing Triton raises."""

    def __init__(self, name: str, module: str) -> None:
        self.name, self.module = name, module
        self.function: Callable[..., Any] | None = None

    def __call__(self, first: Any, *rest: Any) -> Any:
        if self.function is None:
            self.function = getattr(import_module(f"kvkeep.kernels.triton.{self.module}"), self.name)
        with on_device(first.device):
            return self.function(first, *rest)


class KernelDispatch:
    """One function in two implementations; the device of its first argument, a tensor or a quantized cache, decides."""

    def __init__(
        self,
        name: str,
        module: str,
        reference: Callable[..., Any],
        supports: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """reference: the torch implementation; supports: whether the kernel takes these arguments, if it is to run"""
        self.name, self.reference, self.supports = name, reference, supports
        self.kernel = Kernel(name, module)
        self.broken = False

    def uses_kernel(self, first: Any, *rest: Any) -> bool:
        return first.device.type == "cuda" and not self.broken and self.supports(first, *rest)

    def __call__(self, first: Any, *rest: Any) -> Any:
        if not self.uses_kernel(first, *rest):
            return self.reference(first, *rest)
        try:
            return self.kernel(first, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler, a driver or a missing package raises
            self.broken = True
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the kernel '{self.name}' cannot be used ({why}); torch does its work.", stacklevel=2)
            return self.reference(first, *rest)


def _single_query(queries: Tensor, *_: Any) -> bool:
    return queries.shape[2] == 1


def _is_float32(scores: Tensor, *_: Any) -> bool:
    return scores.dtype == torch.float32


def _packs(
    scores: Tensor, forced: Tensor, mask: Tensor | None, member: Tensor | None = None, units: Tensor | None = None
) -> bool:
    return scores.dtype == torch.float32 and (units is None or units.dtype == torch.float32)


def _dense_last_axis(vectors: Tensor, *_: Any) -> bool:
    return vectors.stride(-1) == 1


def _two_dense_last_axes(first: Tensor, second: Tensor, *_: Any) -> bool:
    return first.stride(-1) == second.stride(-1) == 1


def _chunk_fits(queries: Tensor, keys: Tensor, size: int) -> bool:
    """The keys of a chunk are one tile, in a GPU's shared memory."""
    tile = (1 << (size - 1).bit_length()) * (1 << (keys.shape[-1] - 1).bit_length()) * keys.element_size()
    return size <= 512 and tile <= 2**17 and queries.dtype == keys.dtype and _two_dense_last_axes(queries, keys)


def _small_bfloat16(keys: Tensor, *_: Any) -> bool:
    return keys.dtype == torch.bfloat16 and keys.shape[-1] <= 128 and keys.stride(-1) == 1


def _unit_fits(keys: Tensor, mass: Tensor, units: int, *_: Any) -> bool:
    return keys.shape[1] // units * len(mass) <= 2**14


def _angles_fit(vectors: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> bool:
    """All heads have the same number of tokens; their angles are their own or shared."""
    kinds = vectors.dtype in FLOATS and dtype in (torch.float32, vectors.dtype)
    if not kinds or vectors.ndim != 3 or not vectors.numel() or vectors.stride(-1) != 1 or vectors.requires_grad:
        return False
    shapes_fit = cos.shape[:-1] in (vectors.shape[1:2], vectors.shape[:2])
    return shapes_fit and cos.device == vectors.device and cos.is_contiguous() and sin.is_contiguous()


def _has_few_kv_heads(keys: Tensor, values: Tensor, order: Tensor, positions: Tensor, starts: Tensor, *_: Any) -> bool:
    return starts.shape[1] <= 64


def _has_backend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> bool:
    return reference.sdpa_backend(queries, keys, values, scale) is not None


def _is_long(
    queries: Tensor, held_keys: Tensor, held_values: Tensor, keys: Tensor, values: Tensor, scale: float
) -> bool:
    """Two passes are worth it, and torch has a kernel that returns log-sum-exps."""
    parts = held_keys, held_values, keys, values
    if queries.shape[2] * held_keys.shape[2] < TWO_PASSES or any(part.dtype != queries.dtype for part in parts):
        return False
    same_width = held_values.shape[-1] == queries.shape[-1] and queries.shape[-1] % 8 == 0
    return same_width and _has_backend(queries, held_keys, held_values, scale)


# Attention and the caches it reads
chunk_attention = KernelDispatch("chunk_attention", "prefill_attention", reference.masked_chunk_attention, _has_backend)
attention_and_lse = KernelDispatch("attention_and_lse", "prefill_attention", reference.without_lse, _has_backend)
appended_attention = KernelDispatch(
    "appended_attention", "prefill_attention", partial(reference.joined_attention, dense=chunk_attention), _is_long
)
segment_attention = partial(reference.segment_attention, dense=chunk_attention)  # has no kernel of its own
append_ragged = KernelDispatch("append_ragged", "decode", reference.append_ragged)
copy_segments = KernelDispatch("copy_segments", "decode", reference.copy_segments)
padded_attention = KernelDispatch("padded_attention", "decode", reference.padded_attention, _single_query)
ragged_attention = KernelDispatch("ragged_attention", "decode", reference.ragged_attention, _single_query)
extend_attention = KernelDispatch("extend_attention", "decode", reference.extend_attention)
append_quantized = KernelDispatch("append_quantized", "quantized_decode", quantization.append_quantized)
quantized_attention = KernelDispatch(
    "quantized_attention", "quantized_decode", quantization.quantized_attention, _single_query
)
two_region_attention = KernelDispatch(
    "two_region_attention", "retrieval_attention", slotted.two_region_attention, _dense_last_axis
)
slotted_attention = KernelDispatch("slotted_attention", "slotted_attention", slotted.slotted_attention)

# Host memory that a GPU reads itself: elsewhere storage/offload gathers
fetch_units = Kernel("fetch_units", "host_gather")
put_block = Kernel("put", "host_gather")
gather_blocks = Kernel("gather", "host_gather")

# Between a layer's matrix products
rms_norm = KernelDispatch("rms_norm", "layer_ops", elementwise.rms_norm, _dense_last_axis)
gated = KernelDispatch("gated", "layer_ops", elementwise.gated, _two_dense_last_axes)
rotate_heads = KernelDispatch("rotate_heads", "layer_ops", elementwise.rotate_heads, _two_dense_last_axes)
apply_angles = KernelDispatch("apply_angles", "layer_ops", elementwise.apply_angles, _angles_fit)

# Linear layers in 8-bit floats, and what gives them their input
quantize_rows = KernelDispatch("quantize_rows", "fp8_rows", fp8.quantize_rows, _dense_last_axis)
rms_norm_quantized = KernelDispatch("rms_norm_quantized", "fp8_rows", fp8.rms_norm_quantized, _dense_last_axis)
gated_quantized = KernelDispatch("gated_quantized", "fp8_rows", fp8.gated_quantized, _two_dense_last_axes)
fp8_linear = KernelDispatch("fp8_linear", "fp8_product", fp8.fp8_linear)

# Scores
column_mass = KernelDispatch("column_mass", "column_mass", scoring.column_mass)
repeated_attention = KernelDispatch("repeated_attention", "column_mass", scoring.repeated_attention)
chunk_mass = KernelDispatch("chunk_mass", "column_mass", scoring.chunk_mass, _chunk_fits)
quadratic_form = KernelDispatch("quadratic_form", "key_products", scoring.quadratic_form, _small_bfloat16)
js_distance = KernelDispatch("js_distance", "divergence", scoring.js_distance)
assign = KernelDispatch("assign", "key_products", scoring.assign)
means = KernelDispatch("means", "key_products", scoring.means)
key_similarity = KernelDispatch("key_similarity", "key_products", scoring.key_similarity)

# Selection
ranks = KernelDispatch("ranks", "selection", ranking.ranks, _packs)
places_of = KernelDispatch("places_of", "selection", ranking.places_of)
top_counts = KernelDispatch("top_counts", "selection", ranking.top_counts)
evict_voted = KernelDispatch("evict_voted", "evict_voted", votes.evict_voted, _has_few_kv_heads)

# Retrieval of offloaded units
weighted_query = KernelDispatch("weighted_query", "row_queries", retrieval_units.weighted_query, _dense_last_axis)
mean_queries = KernelDispatch("mean_queries", "row_queries", retrieval_units.mean_queries, _dense_last_axis)
share_quota = KernelDispatch("share_quota", "row_queries", retrieval_units.share_quota)
unit_representatives = KernelDispatch(
    "unit_representatives", "unit_scores", retrieval_units.unit_representatives, _unit_fits
)
score_representatives = KernelDispatch("score_representatives", "unit_scores", retrieval_units.score_representatives)
score_page_bounds = KernelDispatch("score_page_bounds", "unit_scores", retrieval_units.score_page_bounds)
score_tokens = KernelDispatch("score_tokens", "unit_scores", retrieval_units.score_tokens)
select_uniform_units = KernelDispatch(
    "select_uniform_units", "unit_select", retrieval_units.select_uniform_units, _is_float32
)
select_counted = KernelDispatch("select_counted", "unit_select", retrieval_units.select_counted)
