"""While the answer is written: who stays at every step, against a replay of the whole history."""

import math
import random

import pytest
import torch
from conftest import EVICTING, make_llama
from families import build, prompt
from oracles.decoding import replay_ahakv, replay_buffered, replay_h2o, replay_streaming, replay_tova, trace_ahakv
from oracles.frontier import oracle_rkv, stream_keep_prompt_random
from oracles.protokv import oracle_protokv
from oracles.snapkv import oracle_snapkv

import kvkeep
from kvkeep.compress.attention import uniform
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.compress.scorers.ahakv import gain
from kvkeep.compress.scorers.order import POSITIONS
from kvkeep.errors import BadParameter
from kvkeep.types import PAD_POSITION

PROMPT, STEPS = 90, 200
IDS = torch.arange(PROMPT + 300).mul(31).add(7).remainder(128)[None]


def seen_by(model, ids):
    """Queries, keys and values of every token. With one layer they do not depend on what is dropped."""
    noted = []

    def note(seen, budget):
        noted.extend([seen.queries, seen.keys, seen.values])
        return torch.zeros(seen.keys.shape[:2])

    model(ids, past_key_values=kvkeep.Cache(model, Method("note", note, observation_window=10_000), 1))
    return [t.double().numpy() for t in noted]


def kept_at_every_step(model, *args, **options):
    cache = kvkeep.Cache(model, *args, **options)
    model(IDS[:, :PROMPT], past_key_values=cache)
    kept = [cache.kept(0)[0]]
    for t in range(PROMPT, PROMPT + STEPS):
        model(IDS[:, t : t + 1], past_key_values=cache)
        if t % 7 == 0:  # looking puts tokens in order; most steps must do without
            cache.kept(0)
        kept.append([sorted(head) for head in peek(cache)])
    assert kept[-1] == cache.kept(0)[0]
    return kept


def peek(cache):
    """Positions held, without putting anything in order."""
    if cache.backend.steps.rows is None:
        return cache.kept(0)[0]
    rows = cache.backend.steps.rows.blocks[0].rows
    held = zip(rows.token_positions[0, 0].tolist(), rows.free_slot[0, 0].tolist(), strict=True)
    return [[p for slot, p in enumerate(head) if slot != free and p != PAD_POSITION] for head, free in held]


def one_layer(heads, kv_heads):
    return make_llama(num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads)


@pytest.mark.core
@pytest.mark.parametrize("heads, kv_heads, budget", [(8, 4, 24), (8, 4, 120), (4, 4, 24), (4, 1, 120)])
def test_h2o_tova_and_ahakv_step_by_step(heads, kv_heads, budget):
    model = one_layer(heads, kv_heads)
    everything = seen_by(model, IDS[:, : PROMPT + STEPS])
    for spec, replay in (("h2o", replay_h2o), ("tova", replay_tova), ("ahakv", replay_ahakv)):
        expected = replay(*everything, PROMPT, budget)
        kept = kept_at_every_step(model, spec, budget)
        wrong = next((s for s, (a, b) in enumerate(zip(kept, expected, strict=True)) if a != b), None)
        assert wrong is None, f"{spec} parts from its replay at step {wrong}"


@pytest.mark.core
@pytest.mark.parametrize(
    "options", [{"step_gain": False}, {"value_prior": False}, {"recent": 5}, {"decode_prior": True}]
)
def test_ahakv_without_its_parts(options):
    model = one_layer(8, 4)
    expected = replay_ahakv(*seen_by(model, IDS[:, : PROMPT + STEPS]), PROMPT, 30, **options)
    assert kept_at_every_step(model, "ahakv", 30, **options) == expected


AHA = [
    {}, {"decode_prior": True}, {"gain": "multiply"}, {"recent_only": False}, {"value_prior": False},
    {"recent_only": False, "decode_prior": True}, {"step_gain": False, "value_pool": 1, "pool": 3},
]  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("seed", range(56))
def test_ahakv_step_by_step_whatever_the_shape(seed):
    draw, options = random.Random(seed), AHA[seed % len(AHA)]
    model = one_layer(*draw.choice([(8, 4), (4, 4), (4, 1), (8, 2)]))
    n, budget, recent = draw.randint(1, 50), draw.randint(1, 30), draw.choice([2, 5, 32])
    torch.manual_seed(seed)
    ids = torch.randint(0, 128, (1, n + 14))
    cache = kvkeep.Cache(model, "ahakv", budget, recent=recent, **options)
    replay = trace_ahakv(*seen_by(model, ids), n, budget, recent=recent, **options)
    for part, (kept, ranked) in zip([ids[:, :n], *ids[:, n:].split(1, 1)], replay, strict=True):
        model(part, past_key_values=cache)
        for mine, theirs, worth in zip(cache.kept(0)[0], kept, ranked, strict=True):
            if odd := set(mine) ^ set(theirs):  # two that float32 cannot tell apart, after which all may differ
                best, worst = max(worth[j] for j in odd), min(worth[j] for j in odd)
                assert len(odd) == 2 and best - worst <= 2e-6 * best, (seed, sorted(odd))
                return


@pytest.mark.core
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("recent_only", [True, False])
def test_ahakv_adds_a_steps_row_as_it_is(recent_only, fast):
    """Algorithm 1, lines 19 and 27: the values weigh the prompt's votes, and not those of the steps that follow."""
    model = one_layer(8, 4)
    options = {"value_pool": 1, "recent": 7, "recent_only": recent_only}  # a budget that never binds: no step gain
    cache = kvkeep.Cache(model, "ahakv", 200, **options)
    cache.backend.steps.is_possible = cache.backend.steps.is_possible if fast else lambda: False
    for start, stop in ((0, 60), (60, 61), (61, 62), (62, 63)):
        model(IDS[:, start:stop], past_key_values=cache)
    values = cache.backend.store[0].dense(0).values.square().sum(-1)[:, :60]
    model.set_attn_implementation("eager")
    rows = model(IDS[:, :63], output_attentions=True).attentions[0][0].view(4, 2, 63, 63).mean(1)
    want = rows[:, 60:].sum(1)
    want[:, :60] += rows[:, 53 if recent_only else 0 : 60, :60].sum(1) * values / values.amax(1, keepdim=True)
    torch.testing.assert_close(cache.backend.store[0].dense(0).token_state[..., 0], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("how, factor", [("replace", 2.0), ("multiply", 0.5)])
def test_ahakv_gain_replaces_the_scale_or_multiplies_it(how, factor):
    got = gain(torch.tensor([79, 80, round(80 * math.e**2)]), 80, 16, 0.25, how).tolist()
    assert got == pytest.approx([1.0, 1.0, factor], rel=1e-3)  # within the budget: the model's own; sqrt(2·2/16) = 0.5


@pytest.mark.core
@pytest.mark.parametrize("spec, sinks", [("streamingllm", 4), ("lm_infinite", 10)])
def test_streaming_step_by_step(spec, sinks):
    expected = replay_streaming(PROMPT, PROMPT + STEPS, 40, sinks, key_heads=4)
    assert kept_at_every_step(one_layer(8, 4), spec, 40) == expected


@pytest.mark.core
@pytest.mark.parametrize("buffer, ways", [(1, ["raw"]), (16, ["softmax", "raw"]), (50, ["softmax"])])
@pytest.mark.slow
def test_buffered_snapkv_and_protokv(buffer, ways):
    model = one_layer(8, 4)
    everything = seen_by(model, IDS[:, : PROMPT + STEPS])
    expected = replay_buffered(oracle_snapkv, *everything, PROMPT, 40, buffer, window=12)
    assert kept_at_every_step(model, "snapkv", 40, schedule=buffer, window=12) == expected
    source = torch.Generator().manual_seed(0)
    chance = {"W": (torch.randn(2, 8, generator=source) * 8**-0.5).double().numpy()}
    chance["b"] = (torch.rand(2, generator=source) * 2 * torch.pi).double().numpy()
    for votes in ways:
        expected = replay_buffered(oracle_protokv, *everything, PROMPT, 40, buffer, votes=votes, **chance)
        assert kept_at_every_step(model, "protokv", 40, schedule=buffer, votes=votes) == expected


@pytest.mark.parametrize("buffer", [16, 90])
def test_rkv_goes_by_the_queries_and_keys_since(buffer):
    model = one_layer(8, 4)
    expected = replay_buffered(oracle_rkv, *seen_by(model, IDS[:, : PROMPT + STEPS]), PROMPT, 60, buffer)
    assert kept_at_every_step(model, f"rkv:buffer={buffer}", 60) == expected


@pytest.mark.parametrize("budget, buffer", [(40, 1), (40, 90), (95, 1), (95, 16), (150, 16), (150, 90)])
def test_the_prompt_stays_and_the_answer_goes_at_random(budget, buffer):
    """A prompt beyond the budget; one that leaves room for five tokens; one that leaves room for sixty."""
    numbers = uniform(5, torch.arange(PROMPT + STEPS) + POSITIONS * torch.arange(4)[:, None]).float().tolist()
    expected = stream_keep_prompt_random(PROMPT, STEPS, budget, buffer, uniform=numbers)
    assert kept_at_every_step(one_layer(8, 4), f"keep_prompt_random:buffer={buffer}", budget, seed=5) == expected


EVERY = [m for m in EVICTING if m != "full"] + [
    "h2o+adakv",
    "snapkv+adakv+pyramid",
    "snapkv+cake",
    "tova+pyramid",
]


@pytest.mark.parametrize("spec", EVERY)
def test_the_budget_holds_at_every_step(spec):
    """Also of methods that would evict more rarely; buffers of any kind: test_registry.py, test_long_decode.py."""
    model, budget = make_llama(num_hidden_layers=2), 24
    cache = kvkeep.Cache(model, spec, budget, schedule="step")
    model(IDS[:, :60], past_key_values=cache)
    sizes = []
    for t in range(60, 110):
        assert model(IDS[:, t : t + 1], past_key_values=cache).logits.isfinite().all()
        assert cache.report().kept_per_head <= budget, t
        sizes.append(cache.nbytes)
    assert max(sizes[20:]) <= 1.1 * max(sizes[:20]) and cache.get_seq_length() == 110


@pytest.mark.core
@pytest.mark.parametrize("spec", [*kvkeep.methods, "h2o+adakv"])
def test_a_budget_that_never_binds_changes_nothing(spec):
    model, ids = make_llama(num_hidden_layers=2), IDS[:, :40]
    want = model.generate(ids, max_new_tokens=10, do_sample=False)
    for schedule in ("step", 4, "prompt"):
        cache = kvkeep.Cache(model, spec, 200, schedule=schedule)
        assert model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False).equal(want)


@pytest.mark.core
@pytest.mark.parametrize("spec", ["h2o", "tova", "ahakv", "streamingllm", "lm_infinite", "snapkv", "snapkv+adakv"])
def test_padded_rows_step_as_they_do_alone(spec):
    model, options = make_llama(), {"schedule": 8} if "snapkv" in spec else {}
    rows = [IDS[:, :80], IDS[:, 100:143]]
    padding = torch.ones(2, 80, dtype=torch.long)
    padding[1, :37] = 0
    batch = torch.cat([rows[0], torch.cat([torch.zeros(1, 37, dtype=torch.long), rows[1]], 1)])
    together = kvkeep.Cache(model, spec, 30, **options)
    tokens = model.generate(batch, attention_mask=padding, past_key_values=together, max_new_tokens=40, do_sample=False)
    for row, ids in enumerate(rows):
        alone = kvkeep.Cache(model, spec, 30, **options)
        want = model.generate(ids, past_key_values=alone, max_new_tokens=40, do_sample=False)
        assert tokens[row, -40:].equal(want[0, -40:])
        assert all(together.kept(i)[row] == alone.kept(i)[0] for i in range(4))


class Stop(Exception):
    pass


def due_in(cache, real):
    """Whose tokens would compete after a pass: one that is cut short then leaves nothing to go on with."""
    return [cache.tracker._should_evict(row, int(count)) for row, count in enumerate(real.sum(1))]


def cut_short(model, ids, **how):
    broken = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Stop()))
    with pytest.raises(Stop):
        model(ids, **how)
    broken.remove()


VOTING = [spec for spec in [*EVICTING, "snapkv+adakv", "tova+cake", "h2o+entropy"] if parse(spec).observation_window]


# which of a pass's columns are real, for each of two rows: they take turns, wait, and come beside padding
UNEVEN = [((1,), (1,)), ((1,), (0,)), ((0, 1), (1, 0)), ((0,), (1,)), ((1,), (1,)), ((0, 0, 1), (0, 1, 0))]
UNEVEN += [((1,), (0,))] * 20 + [((1,), (1,)), ((0,), (1,)), ((0, 1), (0, 0))] * 4


def uneven_batch(rows, prompts):
    """Passes of a batch as (ids, mask of all columns so far): a left-padded prompt, then the steps above."""
    longest, taken, mask = max(prompts), [0, 0], torch.zeros(2, 0, dtype=torch.long)
    columns = [[0] * (longest - n) + [1] * n for n in prompts]
    for real in (columns, *UNEVEN):
        ids = torch.zeros(2, len(real[0]), dtype=torch.long)
        for row, spots in enumerate(real):
            for column in (c for c, is_real in enumerate(spots) if is_real):
                ids[row, column] = rows[row][taken[row]]
                taken[row] += 1
        mask = torch.cat([mask, torch.tensor(real)], 1)
        yield ids, mask


@pytest.mark.core
@pytest.mark.parametrize(
    "spec, cut, schedule",
    [
        *((spec, False, (4, 11)[number % 2]) for number, spec in enumerate(VOTING)),
        ("snapkv", True, 4), ("snapkv", True, 11),
    ],
)  # fmt: skip
def test_padding_does_not_vote_while_a_buffer_fills(spec, cut, schedule):
    """Rows that get their tokens in different passes end as they do alone, and say the same on the way."""
    model = make_llama(num_hidden_layers=2).double()
    rows, prompts = (IDS[0, :150], IDS[0, 200:350].flip(0)), (70, 45)
    together = kvkeep.Cache(model, spec, 32, schedule=schedule)
    said = ([], [])
    for ids, mask in uneven_batch(rows, prompts):
        places = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        how = {"attention_mask": mask, "position_ids": places, "past_key_values": together}
        if cut and together.seen and not any(due_in(together, mask[:, -ids.shape[1] :])):
            cut_short(model, ids, **how)
        logits = model(ids, **how).logits
        for row in range(2):
            said[row].append(logits[row][mask[row, -ids.shape[1] :].bool()])
    for row, count in enumerate(prompts):
        alone, want = kvkeep.Cache(model, spec, 32, schedule=schedule), []
        seen = sum(map(len, said[row]))
        for part in (rows[row][:count], *rows[row][count:seen].split(1)):
            want.append(model(part[None], past_key_values=alone).logits[0])
        torch.testing.assert_close(torch.cat(said[row]), torch.cat(want), atol=1e-5, rtol=0)
        assert all(together.kept(i)[row] == alone.kept(i)[0] for i in range(2))


@pytest.mark.core
@pytest.mark.parametrize(
    "spec, order",
    [
        ("snapkv", [1, 0]), ("snapkv", [1, 1]), ("snapkv", [0, 1, 1]), ("kvkeep", [1, 0]), ("cake", [0, 1, 1]),
        ("protokv", [1, 1]), ("h2o", [1, 0]), ("h2o", [0, 1, 1]), ("tova", [1, 1]),
    ],
)  # fmt: skip
def test_rows_take_their_buffered_queries_along(spec, order):
    """Rows change places while queries wait for the next eviction: each is then judged by its own."""
    model, texts = make_llama(num_hidden_layers=2).double(), (IDS[:, :100], IDS[:, 150:250].flip(1))

    def feed(cache, batch, start, stop):
        for part in (batch[:, t : t + 1] for t in range(start, stop)):
            model(part, past_key_values=cache)

    together, alone, batch = kvkeep.Cache(model, spec, 32, schedule=20), [], torch.cat(texts)
    model(batch[:, :60], past_key_values=together)
    feed(together, batch, 60, 75)  # 15 of 20: nothing was decided since the prompt
    together.reorder_cache(torch.tensor(order))
    feed(together, batch[order], 75, 82)
    for text in texts:
        alone.append(kvkeep.Cache(model, spec, 32, schedule=20))
        model(text[:, :60], past_key_values=alone[-1])
        feed(alone[-1], text, 60, 82)
    assert alone[0].kept(0) != alone[1].kept(0) and alone[0].report().kept_per_head == 34
    for new, old in enumerate(order):
        assert all(together.kept(i)[new] == alone[old].kept(i)[0] for i in range(2))


@pytest.mark.core
@pytest.mark.parametrize(
    "spec", ["h2o", "ahakv", "ahakv:decode_prior=true", "ahakv:recent_only=false", "tova", "streamingllm", "snapkv"]
)
def test_turns_forks_and_files_carry_what_was_noted(spec, tmp_path):
    model, options = make_llama(), {"schedule": 10} if spec == "snapkv" else {}
    cache = kvkeep.Cache(model, spec, 30, **options)
    for number, (start, stop) in enumerate(
        ((0, 70), (70, 71), (71, 72), (72, 110), (110, 111), (111, 112), (112, 113))
    ):
        cache.save(tmp_path / str(number))
        others = [cache.fork(), kvkeep.Cache.load(tmp_path / str(number), model)]
        want = model(IDS[:, start:stop], past_key_values=cache).logits
        for other in others:
            got = model(IDS[:, start:stop], past_key_values=other).logits
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
            assert [other.kept(i) for i in range(4)] == [cache.kept(i) for i in range(4)]
    assert cache.report().kept_per_head <= 30 + 9


@pytest.mark.core
@pytest.mark.parametrize("spec", ["h2o", "ahakv", "tova", "streamingllm", "snapkv", "snapkv+adakv"])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_generation_killed_midway_leaves_a_usable_cache(spec, error):
    """Killed between two passes by a streamer, and in the middle of one: the next goes on as if nothing happened."""
    model, options = make_llama(), {"schedule": 10} if "snapkv" in spec else {}

    class Streamer:
        seen = 0

        def put(self, value):
            self.seen += 1
            if self.seen == 9:
                raise error

        def end(self):
            pass

    cache = kvkeep.Cache(model, spec, 30, **options)
    with pytest.raises(error):
        model.generate(IDS[:, :60], past_key_values=cache, max_new_tokens=50, do_sample=False, streamer=Streamer())
    twin = cache.fork()
    broken = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error()))
    with pytest.raises(error):
        model(IDS[:, :1], past_key_values=cache)
    broken.remove()
    for stop in (1, 2, 3):
        ids = IDS[:, stop - 1 : stop]
        torch.testing.assert_close(
            model(ids, past_key_values=cache).logits, model(ids, past_key_values=twin).logits, atol=1e-5, rtol=0
        )
    assert [cache.kept(i) for i in range(4)] == [twin.kept(i) for i in range(4)]


@pytest.mark.parametrize("spec", ["h2o", "streamingllm"])
def test_a_step_cut_short_in_inference_mode_is_undone_outside_of_it(spec, monkeypatch):
    """After a block of layers has evicted."""
    monkeypatch.setattr("kvkeep.cache.decode.evict_one.BLOCK_LAYERS", {"cpu": 2})
    model, said = make_llama(), []
    for interrupted in (True, False):
        cache = kvkeep.Cache(model, spec, 24)
        with torch.inference_mode():
            for part in (IDS[:, :60], IDS[:, 60:61], IDS[:, 61:62]):
                model(part, past_key_values=cache)
            if interrupted:
                broken = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Stop()))
                with pytest.raises(Stop):
                    model(IDS[:, :1], past_key_values=cache)
                broken.remove()
        said.append(model(IDS[:, 62:63], past_key_values=cache).logits)
    torch.testing.assert_close(*said, atol=1e-5, rtol=0)


def test_schedules_by_name():
    model = make_llama(num_hidden_layers=1)
    assert kvkeep.Cache(model, "snapkv", 30).method.schedule.every is None
    assert kvkeep.Cache(model, "snapkv", 30, schedule="buffer").method.schedule.every == 128
    assert kvkeep.Cache(model, "h2o", 30).method.schedule.every == 1
    assert kvkeep.Cache(model, "h2o", 30, schedule="prompt").method.schedule.every is None
    for bad in (0, -1, "often", True):
        with pytest.raises(BadParameter, match="schedule"):
            kvkeep.Cache(model, "snapkv", 30, schedule=bad)
    assert parse("tova").schedule.every == 1


@pytest.mark.core
@pytest.mark.parametrize("spec", ["streamingllm", "h2o"])
def test_looking_at_one_layer_changes_nothing(spec):
    """Looking puts that layer's tokens in order, and not the others'; the next steps must not mind."""
    model = make_llama()
    looked, left = (kvkeep.Cache(model, spec, 24) for _ in range(2))
    for cache in (looked, left):
        model(IDS[:, :60], past_key_values=cache)
    for t in range(60, 90):
        if t % 4 == 0:
            looked.kept(t % 3)
        got, want = (model(IDS[:, t : t + 1], past_key_values=cache).logits for cache in (looked, left))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "family, options",
    [
        ("gpt_oss", {}), ("gemma2", {}), ("llama", {}), ("gemma2", {"decode_prior": True}),
        ("gpt_oss", {"gain": "multiply"}), ("llama", {"gain": "multiply"}), ("gemma2", {"recent_only": False}),
    ],
)  # fmt: skip
def test_ahakv_notes_the_same_however_a_step_is_done(family, options):
    model = build(family, "eager")
    fast, general = (kvkeep.Cache(model, "ahakv", 24, recent=4, **options) for _ in range(2))
    general.backend.steps.is_possible = lambda: False
    for cache in (fast, general):
        model(prompt(60, rows=2), past_key_values=cache)
        for token in prompt(8, rows=2, seed=2).split(1, 1):
            model(token, past_key_values=cache)
    for layer in fast.compressed_layers:
        assert fast.kept(layer) == general.kept(layer)
        for a, b in zip(fast.backend.store[layer].row(1), general.backend.store[layer].row(1), strict=True):
            order = a.token_positions.argsort()
            torch.testing.assert_close(a.token_state[order], b.token_state, atol=1e-5, rtol=1e-4)
