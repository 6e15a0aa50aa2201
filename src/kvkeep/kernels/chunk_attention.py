"""Causal attention of many queries, without and with keys that all of them see: in torch, and the choice of
triton/prefill_attention.py on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvkeep.kernels.kernel_dispatch import KernelDispatch

WORTH = 2**26  # queries × held keys that are worth a cuDNN plan of their own shape


def masked_chunk_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Of the last q of n tokens, over all of them.

    queries [rows, heads, q, dim], keys and values [rows, kv_heads, n, dim] -> [rows, heads, q, dim]
    """
    q, n, grouped = queries.shape[2], keys.shape[2], queries.shape[1] != keys.shape[1]
    if q == n:
        return sdpa(queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = causal_lower_right(q, n, queries.device)
    return sdpa(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def causal_lower_right(q: int, n: int, device: torch.device) -> Tensor:
    """Causal mask of the last q of n tokens: query i sees the first n - q + i + 1. [q, n] bool"""
    return torch.ones(q, n, dtype=torch.bool, device=device).tril(n - q)


def sdpa_backend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> SDPBackend | None:
    """The kernel in which torch computes attention in half precision without a mask; None where it has none."""
    if queries.dtype not in (torch.float16, torch.bfloat16) or queries.requires_grad:
        return None
    grouped = queries.shape[1] != keys.shape[1]
    choice = torch._fused_sdp_choice(queries, keys, values, None, 0.0, False, scale=scale, enable_gqa=grouped)
    kinds = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    return next((kind for kind in kinds if kind.value == choice), None)


def _has_backend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> bool:
    return sdpa_backend(queries, keys, values, scale) is not None


def without_lse(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
    """No kernel returns it: who needs it computes it."""


chunk_attention = KernelDispatch("chunk_attention", "prefill_attention", _has_backend, masked_chunk_attention)
attention_and_lse = KernelDispatch("attention_and_lse", "prefill_attention", _has_backend, without_lse)


def joined_attention(
    queries: Tensor, held_keys: Tensor, held_values: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Of new tokens, over all that are held and causally over their own.

    queries [rows, heads, q, dim], held [rows, kv_heads, n, dim], keys and values [rows, kv_heads, q, dim]
    -> [rows, heads, q, dim]
    """
    return chunk_attention(queries, torch.cat([held_keys, keys], 2), torch.cat([held_values, values], 2), scale)


def _is_long(
    queries: Tensor, held_keys: Tensor, held_values: Tensor, keys: Tensor, values: Tensor, scale: float
) -> bool:
    """Worth two passes, where torch has a kernel that returns log-sum-exps."""
    parts = held_keys, held_values, keys, values
    if queries.shape[2] * held_keys.shape[2] < WORTH or any(part.dtype != queries.dtype for part in parts):
        return False
    same_width = held_values.shape[-1] == queries.shape[-1] and queries.shape[-1] % 8 == 0
    return same_width and sdpa_backend(queries, held_keys, held_values, scale) is not None


appended_attention = KernelDispatch("appended_attention", "prefill_attention", _is_long, joined_attention)
