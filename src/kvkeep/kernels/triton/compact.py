"""Kept tokens moved to the front of the buffer they lie in: compression without a second buffer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv

TOKENS = 1024  # at a time
SECTOR = 32  # bytes of a token that one program moves: the least a GPU reads


def compact(keys: Tensor, values: Tensor, index: Tensor) -> None:
    """In place: token j of every key head becomes its token index[head, j].

    A head's index is ascending and distinct, hence index[j] >= j; a shorter one is padded at its end with n, which
    moves nothing. What lies behind the front afterwards is rubbish.
    keys, values [kv_heads, n, dim], of any strides but the last, which is 1; index [kv_heads, k]
    """
    index = index.contiguous()
    for buffer in (keys, values):
        if buffer.stride(-1) != 1:
            raise ValueError(
                f"strides {buffer.stride()}: a token's numbers must lie side by side to be moved in place."
            )
        heads, n, dim = buffer.shape
        wide = max(1, SECTOR // buffer.element_size())
        _compact[heads, cdiv(dim, wide)](
            buffer, index, buffer.stride(0), buffer.stride(1), n, dim, index.shape[1], wide, TOKENS,
            num_warps=8, num_stages=1,
        )  # fmt: skip


@triton.jit
def _compact(buffer, index, apart, step, n, dim, k, WIDE: tl.constexpr, TOKENS: tl.constexpr):
    head, channels = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    base, mine = buffer + head * apart + channels[None, :], index + head * k
    # Token j comes from j or later, so blocks that follow want nothing that this one overwrites. Within a block nobody
    # writes before all have read: that is the barrier, which also stops who is done from writing a block ahead of them.
    for start in range(0, k, TOKENS):
        slots = start + tl.arange(0, TOKENS)
        source = tl.load(mine + slots, mask=slots < k, other=n).to(tl.int64)
        moves = ((source < n) & (source != slots))[:, None] & (channels < dim)[None, :]
        tokens = tl.load(base + source[:, None] * step, mask=moves, other=0)
        tl.debug_barrier()
        tl.store(base + slots[:, None].to(tl.int64) * step, tokens, mask=moves)
