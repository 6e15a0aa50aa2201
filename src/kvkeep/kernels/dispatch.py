"""The functions with a Triton kernel, each under one name: Triton's on a GPU, torch's elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.chunk_attention import appended_attention, attention_and_lse, chunk_attention
from kvkeep.kernels.kernel_dispatch import KernelDispatch, kernel, on_device
from kvkeep.kernels.torch import elementwise, quantization, rotation, slotted

__all__ = ["KernelDispatch", "appended_attention", "attention_and_lse", "chunk_attention", "kernel", "on_device"]


def _single_query(queries: Tensor, *_: Any) -> bool:
    return queries.shape[2] == 1


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


append_ragged = KernelDispatch("append_ragged", "decode")
copy_segments = KernelDispatch("copy_segments", "decode")
two_region_attention = KernelDispatch("two_region_attention", "retrieval_attention", _dense_last_axis)
slotted_attention = KernelDispatch("slotted_attention", "slotted_attention", reference=slotted)
padded_attention = KernelDispatch("padded_attention", "decode", _single_query)
ragged_attention = KernelDispatch("ragged_attention", "decode", _single_query)
extend_attention = KernelDispatch("extend_attention", "extend_attention")
append_quantized = KernelDispatch("append_quantized", "quantized_decode", reference=quantization)
quantized_attention = KernelDispatch("quantized_attention", "quantized_decode", _single_query, quantization)
column_mass = KernelDispatch("column_mass", "column_mass")
column_maximum = KernelDispatch("column_maximum", "column_maximum")
repeated_attention = KernelDispatch("repeated_attention", "column_maximum")
chunk_mass = KernelDispatch("chunk_mass", "chunk_mass", _chunk_fits)
quadratic_form = KernelDispatch("quadratic_form", "quadratic_form", _small_bfloat16)
js_distance = KernelDispatch("js_distance", "divergence")
assign = KernelDispatch("assign", "assign")
means = KernelDispatch("means", "assign")
key_similarity = KernelDispatch("key_similarity", "key_similarity")
rotate = KernelDispatch("rotate", "apply_rope", _dense_last_axis, rotation)
rms_norm = KernelDispatch("rms_norm", "layer_ops", _dense_last_axis, elementwise)
gated = KernelDispatch("gated", "layer_ops", _two_dense_last_axes, elementwise)
rotate_heads = KernelDispatch("rotate_heads", "layer_ops", _two_dense_last_axes, elementwise)
