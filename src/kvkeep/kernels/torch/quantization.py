"""Keys and values in 8 or 4 bits a number, and what is done with them there.

A stretch holds the tokens of one row and key head and starts at a multiple of 32 slots. Complete groups of 32 tokens
are codes; the `length % 32` newest tokens wait in a tail, in the model's own precision. A number is zero + code * step:
a key's zero and step are those of its channel within its group, a value's those of its token (KIVI, arXiv:2402.02750).
In 4 bits, channels c and c + dim / 2 share a byte, of which the lower one has the low half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.kernels.torch import reference

GROUP = 32  # tokens that are packed together


@dataclass(frozen=True)
class Packed:
    """Room for the complete groups of many stretches."""

    key_codes: Tensor  # [slots, dim] uint8, in 4 bits [slots, dim / 2]
    key_steps: Tensor  # [slots / 32, dim] in the model's dtype
    key_zeros: Tensor
    value_codes: Tensor  # [slots, wide] uint8, in 4 bits [slots, wide / 2]
    value_steps: Tensor  # [slots] float32
    value_zeros: Tensor
    bits: int

    @classmethod
    def empty(
        cls, slots: int, dim: int, wide: int, bits: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Packed:
        """dim and wide: numbers of a key and of a value; dtype: the model's"""
        if bits not in (4, 8):
            raise ValueError(f"bits={bits}: keys and values are packed in 8 or 4 bits.")
        if slots < GROUP or slots % GROUP:
            raise ValueError(f"slots={slots}: tokens are packed in groups; take a multiple of {GROUP}, at least one.")
        if bits == 4 and (dim % 2 or wide % 2):
            raise ValueError(f"keys of {dim} and values of {wide} numbers: in 4 bits both must be even; use 8 bits.")

        def made(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        return cls(
            key_codes=made(torch.uint8, slots, dim * bits // 8),
            key_steps=made(dtype, slots // GROUP, dim),
            key_zeros=made(dtype, slots // GROUP, dim),
            value_codes=made(torch.uint8, slots, wide * bits // 8),
            value_steps=made(torch.float32, slots),
            value_zeros=made(torch.float32, slots),
            bits=bits,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.key_codes, self.key_steps, self.key_zeros, self.value_codes, self.value_steps, self.value_zeros

    @property
    def device(self) -> torch.device:
        return self.key_codes.device

    @property
    def slots(self) -> int:
        return len(self.key_codes)

    @property
    def wide(self) -> int:
        """Numbers of a value."""
        return self.value_codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of everything, measured on the storages."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


def write(packed: Packed, start: int, keys: Tensor, values: Tensor) -> None:
    """Pack whole groups from slot `start` on. keys [n, dim], values [n, wide]"""
    n = len(keys)
    if start % GROUP or n % GROUP:
        raise ValueError(f"{n} tokens at slot {start}: both must be multiples of {GROUP}; the rest belongs in a tail.")
    if start < 0 or start + n > packed.slots:
        raise ValueError(f"{n} tokens at slot {start} do not fit in {packed.slots} slots.")
    groups = torch.arange(start // GROUP, (start + n) // GROUP, device=packed.device)
    put(packed, groups, *(t.reshape(n // GROUP, GROUP, t.shape[1]) for t in (keys, values)))


def read(packed: Packed, start: int, n: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Any n tokens that were packed, in a dtype (None: the model's). -> keys [n, dim], values [n, wide]"""
    keys, values = _got(packed, torch.arange(start, start + n, device=packed.device))
    dtype = dtype or packed.key_steps.dtype
    return keys.to(dtype), values.to(dtype)


def append_packed(
    packed: Packed,
    tail_keys: Tensor,
    tail_values: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    active: Tensor,
) -> None:
    """One token more in every active row, in place; a tail that is full is packed. The host waits for it.

    A row that is not active keeps all it has, and its starts are not looked at.
    tail_keys [rows, kv_heads, 32, dim], tail_values [rows, kv_heads, 32, wide], key [rows, kv_heads, dim],
    value [rows, kv_heads, wide], starts and lengths [rows, kv_heads], active [rows, 1] of 0 and 1
    """
    mine = active.bool().expand_as(lengths)
    here = mine[..., None] & (torch.arange(GROUP, device=lengths.device) == (lengths % GROUP)[..., None])
    for tail, new in ((tail_keys, key), (tail_values, value)):
        tail.copy_(torch.where(here[..., None], new[:, :, None].to(tail.dtype), tail))
    full = mine & (lengths % GROUP == GROUP - 1)
    put(packed, (starts + lengths)[full] // GROUP, tail_keys[full], tail_values[full])
    lengths += active


def attend_packed(
    queries: Tensor,
    packed: Packed,
    tail_keys: Tensor,
    tail_values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query per row over its stretches' first `lengths` tokens, none more than `longest`; none at all gives zeros.

    queries [rows, heads, 1, dim], the rest as `append_packed` leaves it -> [rows, heads, 1, wide]
    """
    keys, values = unpacked(packed, tail_keys, tail_values, starts, lengths, longest)
    output = reference.attend_slots(queries, keys, values, lengths, scale, softcap, sinks)
    nothing = (lengths == 0).repeat_interleave(queries.shape[1] // lengths.shape[1], 1)
    return output.masked_fill(nothing[..., None, None], 0)


def unpacked(
    packed: Packed, tail_keys: Tensor, tail_values: Tensor, starts: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Every stretch as numbers in the tails' dtype; behind a stretch's length lies anything.

    -> keys [rows, kv_heads, longest, dim], values [rows, kv_heads, longest, wide]
    """
    tokens = torch.arange(longest, device=starts.device)
    coded = _got(packed, (starts[..., None] + tokens).clamp(0, packed.slots - 1))
    late = (tokens >= (lengths // GROUP * GROUP)[..., None])[..., None]
    keys, values = (
        torch.where(late, tail[:, :, tokens % GROUP], old.to(tail.dtype))
        for tail, old in zip((tail_keys, tail_values), coded, strict=True)
    )
    return keys, values


def quantised(numbers: Tensor, over: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of numbers that share a step and a zero along one dimension; both are rounded to a dtype before use.

    A code is the nearest, the upper one of two. -> codes uint8, as many as numbers; steps and zeros, of size 1 there
    """
    levels = 2**bits - 1
    numbers = numbers.float()
    least, most = numbers.aminmax(dim=over, keepdim=True)
    steps, zeros = ((most - least) * (1 / levels)).to(dtype), least.to(dtype)
    codes = ((numbers - zeros.float()) / steps.float() + 0.5).floor().clamp(0, levels)
    return torch.where(steps == 0, 0, codes).to(torch.uint8), steps, zeros


def squeezed(codes: Tensor, bits: int) -> Tensor:
    """Codes as they are stored. [..., dim] uint8 -> [..., dim or dim / 2] uint8"""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def spread(stored: Tensor, bits: int) -> Tensor:
    """The reverse of `squeezed`."""
    return stored if bits == 8 else torch.cat([stored & 15, stored >> 4], -1)


def put(packed: Packed, groups: Tensor, keys: Tensor, values: Tensor) -> None:
    """Pack whole groups where they belong. groups [n] counted from slot 0, keys [n, 32, dim], values [n, 32, wide]"""
    keys, key_steps, key_zeros = quantised(keys, 1, packed.bits, packed.key_steps.dtype)
    values, value_steps, value_zeros = quantised(values, 2, packed.bits, packed.value_steps.dtype)
    packed.key_steps[groups], packed.key_zeros[groups] = key_steps[:, 0], key_zeros[:, 0]
    by_token = (
        (packed.key_codes, squeezed(keys, packed.bits)),
        (packed.value_codes, squeezed(values, packed.bits)),
        (packed.value_steps, value_steps[..., 0]),
        (packed.value_zeros, value_zeros[..., 0]),
    )
    for buffer, new in by_token:
        buffer.view(-1, GROUP, *buffer.shape[1:])[groups] = new


def move(source: Packed, groups: Tensor, target: Packed, places: Tensor) -> None:
    """Copy whole groups as they are from one room to another of the same bits. groups and places [n] from slot 0"""
    for old, new in zip(source.tensors, target.tensors, strict=True):
        theirs, mine = (t.view(each.slots // GROUP, -1) for t, each in ((old, source), (new, target)))
        mine[places] = theirs[groups]


def _got(packed: Packed, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of any slots, as numbers. [...] -> [..., dim], [..., wide] float32"""
    groups = slots // GROUP
    keys = spread(packed.key_codes[slots], packed.bits) * packed.key_steps[groups].float()
    values = spread(packed.value_codes[slots], packed.bits) * packed.value_steps[slots][..., None]
    return keys + packed.key_zeros[groups].float(), values + packed.value_zeros[slots][..., None]
