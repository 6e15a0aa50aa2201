"""A pool of sequences of one method and budget that evict at every step by the votes of their newest queries.

A layer evicts as the last step left it before it appends the next token: as many tokens as there are KV heads, of any
of them. So a step too many is taken back by leaving out its token. All of this is in the captured step. KV heads grow
at the cost of others; every so many steps, between two of them, the room of a row's spans is shared out anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode.buffered_pool import BufferedPool
from kvkeep.cache.decode.policy import vote_rule
from kvkeep.kernels.dispatch import copy_segments, evict_voted
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.upload import upload
from kvkeep.types import PAD_POSITION, Tokens

ROOM = 128  # tokens that a KV head may grow by before its row's room is shared out anew


class VotePool(BufferedPool):
    """A cache of many rows, of whose tokens in every layer those of fewest votes are evicted within each step."""

    def __init__(self, like: Cache) -> None:
        """like: a cache such as those it is for"""
        super().__init__(like)
        rule = vote_rule(like)
        assert rule is not None
        self.rule, self.steps = rule, 0
        self.growth = ROOM if rule.sure < rule.budget else 0  # of a KV head, in a row that is full
        self.most += self.growth
        self.indices = self._new_indices()
        self.sums = self._new_sums()

    def _new_sums(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        """Log-sum-exps of queries in a ring [layers, rows, heads, slots]; none is known [layers, rows, kv_heads]."""
        return {
            device: (
                torch.zeros(*ring.queries.shape[:2], ring.heads, ring.size + 1, dtype=torch.float32, device=device),
                torch.zeros(*ring.queries.shape[:2], self.kv_heads, dtype=torch.int32, device=device),
            )
            for device, ring in self.rings.items()
        }

    def _new_indices(self) -> dict[torch.device, Tensor]:
        """Which token of its KV head lies in a slot, and its position. [layers, 2, slots]"""
        return {
            device: torch.zeros(len(layers), 2, self.tokens + 1, dtype=torch.int32, device=device)
            for device, layers in self.layers_on.items()
        }

    @property
    def nbytes(self) -> int:
        indices, sums = self.indices.values(), self.sums.values()
        return super().nbytes + sum(each.nbytes for each in indices) + sum(lse.nbytes for lse, _ in sums)

    def room_for(self, cache: Cache, answer: int) -> int:
        return min(answer, self.most - cache.tracker.kept[0])

    def grow(self, rows: int, tokens: int, longest: int) -> bool:
        before, slots = self.indices, self.tokens
        grown = super().grow(rows, tokens, longest)
        if self.tokens > slots:
            self.indices = self._new_indices()
            for device, indices in before.items():
                self.indices[device][..., :slots] = indices[..., :slots]
        if grown:
            self.sums = self._new_sums()  # computed anew
        return grown

    # one row

    def admit(self, row: int, cache: Cache, answer: int) -> None:
        super().admit(row, cache, answer)
        held = self.used[row].held
        for device, layers in self.layers_on.items():
            starts, lengths = self.tables[device][:, :, row]
            each = [held[i].token_positions for i in layers]
            longest = max(part.shape[1] for part in each)
            positions = torch.stack([pad(part, (0, longest - part.shape[1])) for part in each])
            index = torch.arange(longest, dtype=torch.int32, device=device)
            slots = torch.where(index < lengths[..., None], starts[..., None] + index, self.tokens).flatten(1)
            values = torch.stack([index.expand_as(positions), positions], 1).flatten(2)
            self.indices[device].scatter_(2, slots[:, None].expand_as(values), values)
            self.sums[device][1][:, row] = 0
        held.clear()

    def complete(self, row: int, cache: Cache, count: int) -> None:
        """Move a row's tokens back to its cache, as it is after `count` decoded tokens."""
        queries, backend = self._tell(row, count), self.used[row].backend
        more = int(next(iter(self.rings.values())).written[row]) - cache.seen  # a step too many
        lengths = {
            i: [n - more for n in each]
            for device, layers in self.layers_on.items()
            for i, each in zip(layers, self.tables[device][1, :, row].tolist(), strict=True)
        }

        def held(index: int) -> tuple[Tokens, list[int]]:
            return self._in_order(row, index, lengths[index], cache.seen), lengths[index]

        evicts = not more and max(map(sum, lengths.values())) > self.kv_heads * self.rule.budget
        backend.fill_decoded(held, queries, self.how, cache.seen, evicts)
        del self.used[row]

    def _in_order(self, row: int, index: int, lengths: list[int], seen: int) -> Tokens:
        """The first so many tokens of a row's KV heads, of so many of text so far. [kv_heads, longest, …]"""
        buffer = self.buffers[index]
        device, starts = buffer.kind.device, self.places[index].starts[row]
        order, positions = self.indices[device][self.layers_on[device].index(index)]
        ends = upload(lengths, device)
        order[starts + ends - 1], positions[starts + ends - 1] = (ends - 1).int(), seen - 1
        places = torch.arange(max(lengths), device=device)
        unused, slots = places >= ends[:, None], (starts[:, None] + places).clamp_max(self.tokens)
        slots = slots.gather(1, order[slots].masked_fill(unused, PAD_POSITION).argsort(1))
        return Tokens(buffer.keys[slots], buffer.values[slots], positions[slots].masked_fill(unused, PAD_POSITION))

    # a step

    def begin_step(self) -> bool:
        self.steps += 1
        if self.growth and self.steps % self.growth == 0:
            self._share_room(sorted(self.used))
        return False

    def _share_room(self, rows: list[int]) -> None:
        """Leave the KV heads of each layer as much room as each other; their tokens stay as they lie."""
        for device, layers in self.layers_on.items():
            used = upload(rows, device)
            starts, lengths = self.tables[device][:, :, used]
            numbers = [self.compressed_layers.index(i) for i in layers]
            spans = upload([[self.allocated[row][number] for row in rows] for number in numbers], device)
            sizes = lengths + (spans[..., 1:] - lengths.sum(-1, keepdim=True)) // self.kv_heads
            moved, totals = spans[..., :1] + sizes.cumsum(-1) - sizes, lengths.sum((1, 2)).tolist()
            for number, i in enumerate(layers):
                buffer, (order, positions) = self.buffers[i], self.indices[device][number, ..., None]
                first, ends = starts[number].flatten(), (starts + lengths)[number].flatten()
                for parts in ((buffer.keys, buffer.values), (order, positions)):
                    source = parts[0].clone(), parts[1].clone()
                    copy_segments(*parts, moved[number].flatten(), source, first, ends, totals[number])
            self.tables[device][0, :, used] = moved

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        buffer = self.buffers[index]
        device = buffer.kind.device
        number, ring = self.layers_on[device].index(index), self.rings[device]
        starts, lengths, _ = self.places[index].first(len(call.query))
        tokens = buffer.keys, buffer.values, *self.indices[device][number], starts, lengths
        lse, known = self.sums[device]
        voting = ring.queries[number], ring.written, lse[number], known[number]
        evict_voted(*tokens, *voting, self.longest, self.rule, *call.how)
        return super().attend(index, call)

    def lse_out(self, index: int) -> tuple[Any, ...]:
        """The log-sum-exps of the newest queries: the next step needs them before it evicts."""
        device = self.buffers[index].kind.device
        return ((self.sums[device][0][self.layers_on[device].index(index)], self.rings[device].slots),)
