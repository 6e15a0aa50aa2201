"""No query is ever farther from a key than the model was trained for, whatever the sizes: `cache/reach.py`."""

import random
from dataclasses import replace

import pytest
import torch
from conftest import make_llama

import kvkeep
from kvkeep.cache.decode.row_pool import RowPool
from kvkeep.cache.decode.step_pool import StepPool
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.compress.parse import parse
from kvkeep.compress.positions import Contiguous
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import CacheMisuse

SPECS = ["intelllm", "intelllm:gap=20", "streamingllm", "lm_infinite", "intelllm+adakv", "lm_infinite:sinks=2"]
PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def farthest(monkeypatch):
    """The largest distance of a query from a key that it attends to, of every way to decode."""
    found = [0]

    def note(last, lowest):
        found[0] = max(found[0], int(last) - int(lowest))

    def attend(self, index, call, layout, before=EvictingBackend.attend):
        for row, positions in enumerate(layout.positions):
            heads = [head.rope_positions for head in self.store[index].row(row)] if self.store[index] else []
            if len(positions):
                note(positions[-1], min([int(head.min()) for head in heads if len(head)], default=positions[0]))
        return before(self, index, call, layout)

    def step(self, index, call, before=StepPool.attend):
        block, number = self.block_of[index]
        rows = block.rows
        for row in self.allocated:
            held = torch.arange(block.shape.slots) < rows.used[row, :, None] - 1
            if rows.lengths[row] > self.rule.tokens:
                held = torch.arange(block.shape.slots) != rows.free_slot[row, number, :, None]
            note(rows.lengths[row], rows.rope_positions[row, number][held].min())
        return before(self, index, call)

    def admit(self, request, before=PooledBatch.admit):
        cache, new = request.sequence.cache, request.how.max_new_tokens
        if isinstance(self.pool, RowPool):
            heads = [head for layer in cache.backend.store.values() for head in layer.row(0)]
            note(cache.seen + new - 1, min(int(head.rope_positions.min()) for head in heads))
        return before(self, request)

    monkeypatch.setattr(EvictingBackend, "attend", attend)
    monkeypatch.setattr(StepPool, "attend", step)
    monkeypatch.setattr(PooledBatch, "admit", admit)
    return found


class Words:
    def decode(self, ids, **_):
        return ""


def generate(model, spec, budget, prompt, new, chunk, schedule):
    cache = kvkeep.Cache(model, spec, budget, schedule=schedule)
    for ids in (prompt, torch.cat([prompt, prompt[: len(prompt) // 2 + 1]])):  # a second turn goes on
        left = ids[None, cache.seen :] if cache.seen else ids[None]
        for first in range(0, left.shape[1], chunk):
            model(left[:, first : first + chunk], past_key_values=cache)
        for _ in range(new):
            model(torch.tensor([[3]]), past_key_values=cache)


def plain_generate(model, spec, budget, prompt, new, chunk, schedule):
    cache = kvkeep.Cache(model, spec, budget, schedule=schedule)
    model.generate(prompt[None], past_key_values=cache, max_new_tokens=new, prefill_chunk_size=chunk, **PLAIN)


def serve(model, spec, budget, prompt, new, chunk, schedule):
    config = SequenceConfig(model, Words(), parse(spec), budget, chunk, {"schedule": schedule})
    scheduler = Scheduler(model, set(), max_rows=4)
    first = Request(config, prompt, Generation(new), keeps_cache=True)
    scheduler.run([first, Request(config, prompt[: len(prompt) // 3 + 1], Generation(new))])
    more = torch.cat([torch.tensor(first.sequence.token_ids), prompt[:9]])
    scheduler.run([Request(config, more, Generation(new), continues=first.sequence)])


@pytest.mark.core
@pytest.mark.parametrize("run", [generate, plain_generate, serve])
@pytest.mark.parametrize("seed", range(12))
def test_no_query_is_farther_from_a_key_than_the_context_length(run, seed, farthest):
    draw = random.Random(seed)
    window = draw.choice([40, 64])
    model = make_llama(num_hidden_layers=2, max_position_embeddings=window)
    spec = SPECS[seed % len(SPECS)]
    small = "adakv" in spec or "gap" in spec  # a head of many tokens leaves no room, and a gap that does is refused
    budget = draw.randint(14, window // 2) if small else draw.choice([draw.randint(14, window + 5), 0.3, 0.97])
    prompt = torch.randint(0, 128, (draw.randint(window // 2, 3 * window),))
    how = draw.randint(1, window + window // 2), draw.randint(1, 2 * window), draw.choice([None, "prompt"])
    run(model, spec, budget, prompt, *how)
    assert 0 < farthest[0] < window, (spec, budget, len(prompt), how)


def test_keys_stay_as_far_as_there_is_room(farthest):
    """IntelLLM with a gap that ends at the context length: what follows is reserved in the gap."""
    model = make_llama(num_hidden_layers=1, max_position_embeddings=512)
    cache = kvkeep.Cache(model, "intelllm", 256, gap=384)
    model(torch.randint(0, 128, (1, 500)), past_key_values=cache)
    for _ in range(300):
        model(torch.tensor([[3]]), past_key_values=cache)
    assert farthest[0] == 511
    heads = cache.backend.store[0].row(0)
    assert all(head.rope_positions.diff().gt(0).all() for head in heads), "in order, no two at one position"


@pytest.mark.parametrize("tokens", [65, 150])
@pytest.mark.parametrize("spec", ["lookahead", "kvzip"])
def test_a_prompt_in_pieces_is_fed_again_piece_by_piece(spec, tokens):
    """By a method of one's own that gives keys new positions and runs the model again after a prompt."""
    model = make_llama(num_hidden_layers=2, max_position_embeddings=64)
    method, ids = replace(parse(spec), placement=Contiguous()), torch.randint(0, 128, (1, tokens))
    whole, chunks = (kvkeep.Cache(model, method, 16) for _ in range(2))
    got = [model(ids, past_key_values=whole).logits, model(ids[:, :1], past_key_values=whole).logits]
    left, want = ids, []
    while left.shape[1]:
        size = min(chunks.chunk_limit, left.shape[1])
        size -= left.shape[1] == size + 1
        want.append(model(left[:, :size], past_key_values=chunks).logits)
        left = left[:, size:]
    want.append(model(ids[:, :1], past_key_values=chunks).logits)
    torch.testing.assert_close(torch.cat(got, 1), torch.cat(want, 1))
    assert whole.kept(1) == chunks.kept(1) and whole.longest_head < 32


def test_a_pass_in_pieces_is_the_same_pass():
    """A prompt that is split inside says what the same prompt says in chunks; without the model's own forward, not."""
    model = make_llama(num_hidden_layers=2, max_position_embeddings=64)
    ids = torch.randint(0, 128, (2, 150))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    whole, chunks = (kvkeep.Cache(model, "streamingllm", 32) for _ in range(2))
    got = model(ids, attention_mask=mask, past_key_values=whole).logits
    ends = [0, 64, 96, 128, 150]
    parts = [
        model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=chunks).logits
        for start, end in zip(ends[:-1], ends[1:], strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(parts, 1))
    shown = model(ids, past_key_values=kvkeep.Cache(model, "streamingllm", 32), logits_to_keep=3).logits
    assert shown.shape[1] == 3
    with pytest.raises(CacheMisuse, match="prefill_chunk_size"):
        model.model(ids, past_key_values=kvkeep.Cache(model, "streamingllm", 32))
    with pytest.raises(CacheMisuse, match="prefill_chunk_size"):
        model(ids, past_key_values=kvkeep.Cache(model, "streamingllm", 32), output_hidden_states=True)
