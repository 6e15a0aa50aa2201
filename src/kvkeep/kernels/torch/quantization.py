"""Keys and values quantized to 8 or 4 bits: format, append and attention.

A segment holds the tokens of one row and KV head and starts at a multiple of 32 slots. Complete groups of 32 tokens
are codes; the `length % 32` newest tokens stay in a tail, in the model's dtype. A number is min + code * scale: keys
have one min and scale per channel and group, values one per token (KIVI, arXiv:2402.02750).
In 4 bits, channels c and c + dim / 2 share a byte: c has the low half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.kernels.torch import reference

GROUP_SIZE = 32  # tokens quantized together


@dataclass(frozen=True)
class QuantizedKV:
    """Buffers for the complete groups of many segments."""

    key_codes: Tensor  # [slots, dim] uint8, in 4 bits [slots, dim / 2]
    key_scales: Tensor  # [slots / 32, dim] in the model's dtype
    key_mins: Tensor
    value_codes: Tensor  # [slots, value_dim] uint8, in 4 bits [slots, value_dim / 2]
    value_scales: Tensor  # [slots] float32
    value_mins: Tensor
    bits: int

    @classmethod
    def empty(
        cls, slots: int, dim: int, value_dim: int, bits: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> QuantizedKV:
        """dtype: the model's"""
        if bits not in (4, 8):
            raise ValueError(f"bits={bits}: keys and values are quantized to 8 or 4 bits.")
        if slots < GROUP_SIZE or slots % GROUP_SIZE:
            raise ValueError(f"slots={slots}: tokens are quantized in groups; use a multiple of {GROUP_SIZE}.")
        if bits == 4 and (dim % 2 or value_dim % 2):
            raise ValueError(f"keys of {dim} and values of {value_dim} channels: in 4 bits both must be even; use 8.")

        def zeros(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        return cls(
            key_codes=zeros(torch.uint8, slots, dim * bits // 8),
            key_scales=zeros(dtype, slots // GROUP_SIZE, dim),
            key_mins=zeros(dtype, slots // GROUP_SIZE, dim),
            value_codes=zeros(torch.uint8, slots, value_dim * bits // 8),
            value_scales=zeros(torch.float32, slots),
            value_mins=zeros(torch.float32, slots),
            bits=bits,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.key_codes, self.key_scales, self.key_mins, self.value_codes, self.value_scales, self.value_mins

    @property
    def device(self) -> torch.device:
        return self.key_codes.device

    @property
    def slots(self) -> int:
        return len(self.key_codes)

    @property
    def value_dim(self) -> int:
        return self.value_codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, measured on their storages."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


def append_quantized(
    kv: QuantizedKV,
    tail_keys: Tensor,
    tail_values: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    active: Tensor,
) -> None:
    """Append one token to every active row in place; a full tail is quantized. Synchronizes with the device.

    Inactive rows do not change, and their starts are not read.
    tail_keys [rows, kv_heads, 32, dim], tail_values [rows, kv_heads, 32, value_dim], key [rows, kv_heads, dim],
    value [rows, kv_heads, value_dim], starts and lengths [rows, kv_heads], active [rows, 1] of 0 and 1
    """
    mine = active.bool().expand_as(lengths)
    here = mine[..., None] & (torch.arange(GROUP_SIZE, device=lengths.device) == (lengths % GROUP_SIZE)[..., None])
    for tail, new in ((tail_keys, key), (tail_values, value)):
        tail.copy_(torch.where(here[..., None], new[:, :, None].to(tail.dtype), tail))
    full = mine & (lengths % GROUP_SIZE == GROUP_SIZE - 1)
    write_groups(kv, (starts + lengths)[full] // GROUP_SIZE, tail_keys[full], tail_values[full])
    lengths += active


def quantized_attention(
    queries: Tensor,
    kv: QuantizedKV,
    tail_keys: Tensor,
    tail_values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """One query per row over the first `lengths` <= longest tokens of its segments; zeros for an empty segment.

    queries [rows, heads, 1, dim], the rest as in `append_quantized` -> [rows, heads, 1, value_dim]
    """
    keys, values = dequantize_segments(kv, tail_keys, tail_values, starts, lengths, longest)
    output = reference.padded_attention(queries, keys, values, lengths, scale, softcap, sink_logits)
    empty = (lengths == 0).repeat_interleave(queries.shape[1] // lengths.shape[1], 1)
    return output.masked_fill(empty[..., None, None], 0)


def dequantize_segments(
    kv: QuantizedKV, tail_keys: Tensor, tail_values: Tensor, starts: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Every segment in the tails' dtype; entries beyond a segment's length are arbitrary.

    -> keys [rows, kv_heads, longest, dim], values [rows, kv_heads, longest, value_dim]
    """
    tokens = torch.arange(longest, device=starts.device)
    groups = _dequantize(kv, (starts[..., None] + tokens).clamp(0, kv.slots - 1))
    in_tail = (tokens >= (lengths // GROUP_SIZE * GROUP_SIZE)[..., None])[..., None]
    keys, values = (
        torch.where(in_tail, tail[:, :, tokens % GROUP_SIZE], old.to(tail.dtype))
        for tail, old in zip((tail_keys, tail_values), groups, strict=True)
    )
    return keys, values


def quantize(numbers: Tensor, over: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of numbers that share a scale and a min along dimension `over`; both are rounded to a dtype before use.

    Codes are rounded half up. -> codes uint8 in the shape of numbers; scales and mins, of size 1 along `over`
    """
    levels = 2**bits - 1
    numbers = numbers.float()
    least, most = numbers.aminmax(dim=over, keepdim=True)
    scales, mins = ((most - least) * (1 / levels)).to(dtype), least.to(dtype)
    codes = ((numbers - mins.float()) / scales.float() + 0.5).floor().clamp(0, levels)
    return torch.where(scales == 0, 0, codes).to(torch.uint8), scales, mins


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Two 4-bit codes per byte. [..., dim] uint8 -> [..., dim or dim / 2] uint8"""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def unpack_codes(stored: Tensor, bits: int) -> Tensor:
    """The reverse of `pack_codes`."""
    return stored if bits == 8 else torch.cat([stored & 15, stored >> 4], -1)


def write_groups(kv: QuantizedKV, groups: Tensor, keys: Tensor, values: Tensor) -> None:
    """Quantize whole groups. groups [n]: target group indices, keys [n, 32, dim], values [n, 32, value_dim]"""
    keys, key_scales, key_mins = quantize(keys, 1, kv.bits, kv.key_scales.dtype)
    values, value_scales, value_mins = quantize(values, 2, kv.bits, kv.value_scales.dtype)
    kv.key_scales[groups], kv.key_mins[groups] = key_scales[:, 0], key_mins[:, 0]
    by_token = (
        (kv.key_codes, pack_codes(keys, kv.bits)),
        (kv.value_codes, pack_codes(values, kv.bits)),
        (kv.value_scales, value_scales[..., 0]),
        (kv.value_mins, value_mins[..., 0]),
    )
    for buffer, new in by_token:
        buffer.view(-1, GROUP_SIZE, *buffer.shape[1:])[groups] = new


def copy_groups(source: QuantizedKV, groups: Tensor, target: QuantizedKV, targets: Tensor) -> None:
    """Copy whole groups between buffers of the same bits. groups and targets [n]: group indices"""
    for old, new in zip(source.tensors, target.tensors, strict=True):
        theirs, mine = (t.view(each.slots // GROUP_SIZE, -1) for t, each in ((old, source), (new, target)))
        mine[targets] = theirs[groups]


def _dequantize(kv: QuantizedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of any slots. [...] -> [..., dim], [..., value_dim] float32"""
    groups = slots // GROUP_SIZE
    keys = unpack_codes(kv.key_codes[slots], kv.bits) * kv.key_scales[groups].float()
    values = unpack_codes(kv.value_codes[slots], kv.bits) * kv.value_scales[slots][..., None]
    return keys + kv.key_mins[groups].float(), values + kv.value_mins[slots][..., None]
