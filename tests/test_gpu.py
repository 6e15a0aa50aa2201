"""The same on a GPU as on a processor. Skipped where there is none."""

import copy
import dataclasses
import random
import string

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING, make_llama

import kvkeep
from kvkeep.cache import passes
from kvkeep.cache.decode import draft_pool, policy
from kvkeep.cache.decode.buffered_pool import BufferedPool
from kvkeep.cache.decode.vote_pool import VotePool
from kvkeep.compress.parse import parse
from kvkeep.engine.history_store import sequence_after
from kvkeep.engine.request import Request
from kvkeep.engine.retrieval_batch import RetrievalBatch
from kvkeep.engine.sampling import Generation
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.kernels import dispatch
from kvkeep.kernels.torch import elementwise
from kvkeep.model import cuda_graph
from kvkeep.model.cuda_graph import CudaGraphRunner
from kvkeep.model.fp8_model import CAPABILITY, use_weights
from kvkeep.model.fused import fused_ops
from kvkeep.model.hf_attention import AttentionCall, attend_with_lse
from kvkeep.storage.history import History, HostPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IDS = torch.randperm(512, generator=torch.Generator().manual_seed(0))[None, :400]


def captured(batch):
    """The runners of a batch's steps, if it captures them."""
    return batch.runner.graphs.values() if hasattr(batch, "runner") else []


@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING])
def test_a_gpu_decides_and_computes_as_a_processor(spec):
    if parse(spec).retrieval and parse(spec).retrieval.needs:
        pytest.skip("needs the engine")
    logits, kept = {}, {}
    for device in ("cpu", "cuda"):
        model = make_llama(vocab_size=512).to(device)
        window = {"window": 16} if parse(spec).retrieval and parse(spec).retrieval.window else {}
        cache = kvkeep.Cache(model, spec, 64, **window)
        pieces = [IDS[:, :200], *(IDS[:, t : t + 1] for t in range(200, 230))]
        logits[device] = [model(piece.to(device), past_key_values=cache).logits[:, -1].cpu() for piece in pieces]
        kept[device] = [cache.kept(layer) for layer in range(4)]
    assert kept["cpu"] == kept["cuda"]
    assert max((a - b).abs().max() for a, b in zip(*logits.values(), strict=True)) < 1e-3


@pytest.mark.parametrize("spec", ["actqkv", "infllm", "emllm"])
def test_device_memory_is_constant_in_the_length(spec):
    """But for the index, of which a pool has a copy: in tokenselect's, which would be all keys."""
    model, words = tiny_chat.model().to("cuda"), tiny_chat.tokenizer()
    most = {}
    for length in (6000, 18000):  # in both, more units are offloaded than a pool has slots for
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        engine = kvkeep.Engine(model, words, spec, 256, prefill_chunk_size=64)
        engine.generate("".join(chr(97 + i * i % 23) for i in range(length)), max_new_tokens=2)
        report = engine.cache.report()
        pools = [batch.pool for batch in engine._driver.scheduler.held.batches.values() if hasattr(batch, "pool")]
        layers = [layer for pool in pools for layer in getattr(pool, "rows_of", {}).values()]
        indexed = [t for layer in layers for t in (layer.entries, layer.units.slot_of, layer.units.table)]
        copies = [t.nbytes for t in indexed]
        most[length] = torch.cuda.max_memory_allocated() - report.index_bytes - sum(copies)
        assert all(block.keys.is_pinned() for block in engine.cache.backend.states[0][0].host.blocks)
        assert all(rows[0].host.table for rows in engine.cache.backend.states.values())  # fetched by the kernel
        del engine
    assert most[18000] <= 1.1 * most[6000]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("spec", ["full", "kvkeep", "snapkv", "snapkv+adakv", "h2o", "intelllm", "cake"])
def test_a_batch_in_a_graph_says_what_each_says_alone(spec):
    model, words = tiny_chat.model().to("cuda"), tiny_chat.tokenizer()
    engine = kvkeep.Engine(model, words, spec, 48, schedule="prompt")
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(100 + 40 * seed)) for seed in range(5)]
    assert engine.generate(prompts, rows=3, max_new_tokens=20) == [
        engine.generate(prompt, max_new_tokens=20) for prompt in prompts
    ]


VOTES_APART = {20: 8, 60: 0, 100: 10, 140: 0, 180: 11}  # length and seed; relative to each other, 2e-6 in float64


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("spec", ["snapkv:window=8", "snapkv", "snapkv+adakv", "snapkv:pooling=max+adakv:alpha=0"])
def test_rows_that_evict_by_votes_in_a_graph_say_what_each_says_alone(spec, monkeypatch):
    model, words, new = tiny_chat.model().to("cuda"), tiny_chat.tokenizer(), 150
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(20 + 40 * seed)) for seed in range(5)]
    if spec == "snapkv+adakv":  # those have votes nearer to each other than what the two ways round differently
        prompts, new = [letters(seed, length) for length, seed in VOTES_APART.items()], 100
    engine = kvkeep.Engine(model, words, spec, 48, schedule="step")
    together = engine.generate(prompts, rows=3, max_new_tokens=new)
    (batch,) = engine._driver.scheduler.held.batches.values()
    assert isinstance(batch.pool, VotePool) and all(runner.graph for runner in batch.runner.graphs.values())
    monkeypatch.setattr(policy, "vote_rule", lambda cache: None)
    engine = kvkeep.Engine(model, words, spec, 48, schedule="step")
    assert together == [engine.generate(prompt, max_new_tokens=new) for prompt in prompts]


def letters(seed, length):
    return "".join(map(random.Random(seed).choice, length * [string.ascii_lowercase]))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("spec", ["rkv", "kvkeep", "snapkv", "snapkv+adakv", "keep_prompt_random"])
def test_rows_that_evict_between_two_graphs_say_what_each_says_alone(spec):
    model, words = tiny_chat.model().to("cuda"), tiny_chat.tokenizer()
    engine = kvkeep.Engine(model, words, spec, 48, schedule=8)
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(100 + 40 * seed)) for seed in range(5)]
    together = engine.generate(prompts, rows=3, max_new_tokens=40)
    (batch,) = engine._driver.scheduler.held.batches.values()
    assert isinstance(batch.pool, BufferedPool) and all(runner.graph for runner in batch.runner.graphs.values())
    assert together == [engine.generate(prompt, max_new_tokens=40) for prompt in prompts]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("spec", ["full", "kvkeep", "snapkv+adakv", "h2o"])
def test_a_batch_of_few_bits_in_a_graph_says_what_each_says_alone(spec, storage):
    """40 tokens each, so that tails are packed while the graph is replayed."""
    model, words = tiny_chat.model().to("cuda"), tiny_chat.tokenizer()
    engine = kvkeep.Engine(model, words, spec, 48, schedule="prompt", storage=storage)
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(100 + 40 * seed)) for seed in range(5)]
    alone = [engine.generate(prompt, max_new_tokens=40) for prompt in prompts]
    assert engine.generate(prompts, rows=3, max_new_tokens=40) == alone


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_few_bits_on_a_gpu_are_those_of_a_processor(storage):
    logits = {}
    for device in ("cpu", "cuda"):
        model = make_llama(vocab_size=512).to(device)
        cache = kvkeep.Cache(model, "snapkv+adakv", 64, storage=storage)
        pieces = [IDS[:, :200], *(IDS[:, t : t + 1] for t in range(200, 270))]
        logits[device] = [model(piece.to(device), past_key_values=cache).logits[:, -1].cpu() for piece in pieces]
    assert max((a - b).abs().max() for a, b in zip(*logits.values(), strict=True)) < 2e-3


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("storage", [None, "int8"])
def test_rows_come_and_go_in_graphs(storage):
    """A pool that grows, graphs of 1, 2 and 4 rows, streams and lists beside each other: the answers of a cache."""
    model, words = tiny_chat.sharp()
    model = model.to("cuda").double() if storage is None else model.to("cuda")
    prompts = ["".join(chr(97 + (i * i + n) % 23) for i in range(100 + 60 * n)) for n in range(5)]
    plain = kvkeep.Engine(model, words, "snapkv+adakv", 48, storage=storage)
    want = []
    for prompt in prompts:
        sequence = plain.config.new_sequence()
        logits, ids = sequence.prefill(plain.encode(prompt)), []
        for _ in range(12):
            ids.append(int(logits.argmax()))
            logits = sequence.extend(torch.tensor(ids[-1:]))[-1]
        want.append(words.decode(ids, skip_special_tokens=True))
    engine = kvkeep.Engine(model, words, "snapkv+adakv", 48, storage=storage, max_rows=4)
    assert [engine.generate(prompt, max_new_tokens=12) for prompt in prompts] == want
    handles = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
    assert [handle.result() for handle in handles] == want == engine.generate(prompts, max_new_tokens=12)
    (batch,) = engine._driver.scheduler.held.batches.values()
    assert batch.runner.graphs and all(runner.graph is not None for runner in batch.runner.graphs.values())
    assert engine.generate(prompts[0], max_new_tokens=12) == want[0] and engine.cache.seen == len(engine.token_ids)


STEPS = ["h2o", "tova", "ahakv", "streamingllm", "lm_infinite", "h2o+sinks"]


def without_graph(model):
    """Make what goes in the place of `CudaGraphRunner._try`: steps then run as they are, with fused operations."""

    def keep_uncaptured(runner, *_):
        def fused(run=runner.run):
            with fused_ops(model):
                return run()

        runner.run = fused
        return True

    return keep_uncaptured


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize(
    "spec, kind",
    [*((spec, torch.float32) for spec in STEPS), ("h2o", torch.bfloat16), ("streamingllm", torch.bfloat16)],
)
def test_evicting_at_every_step_in_graphs_says_what_it_says_without(spec, kind, monkeypatch):
    model, words = tiny_chat.sharp()
    model = model.to("cuda", kind)
    prompts = ["".join(chr(97 + (i * i + n) % 23) for i in range(20 + 60 * n)) for n in range(3)]
    said = {}
    for graphs in (True, False):
        engine = kvkeep.Engine(model, words, spec, 48, max_rows=4)
        engine.warmup(rows=2)
        said[graphs] = engine.generate(prompts, max_new_tokens=64)
        handles = [engine.submit(prompt, max_new_tokens=16, temperature=1.0, seed=3) for prompt in prompts]
        said[graphs] += [handle.result() for handle in handles]
        (batch,) = engine._driver.scheduler.held.batches.values()
        assert {runner.graph is not None for runner in batch.runner.graphs.values()} == {graphs}
        assert type(batch.pool).__name__ == "StepPool"
        monkeypatch.setattr(CudaGraphRunner, "_try", without_graph(model))
    assert said[True] == said[False]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("spec", STEPS)
def test_a_cache_comes_back_from_graphs_as_without_them(spec):
    """Although a step more has run on the device when the last token is read."""
    model, words = tiny_chat.sharp()
    engine = kvkeep.Engine(model.to("cuda").double(), words, spec, 48)
    for prompt in ("ab", "".join(chr(97 + i * i % 23) for i in range(120))):
        engine.generate(prompt, max_new_tokens=25)
        n, ids = engine.length(prompt), torch.tensor(engine.token_ids)
        alone = engine.config.new_sequence()
        alone.prefill(ids[:n])
        for token in ids[n:].split(1):
            alone.extend(token)
        assert len(ids) > n and engine.cache.seen == alone.cache.seen == len(ids)
        for layer in range(2):
            assert engine.cache.kept(layer) == alone.cache.kept(layer)
            mine, theirs = (each.backend.store[layer].dense(0) for each in (engine.cache, alone.cache))
            for name, part in mine.parts.items():
                torch.testing.assert_close(part, theirs.parts[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads, kv_heads, n, dim", [(8, 8, 100, 64), (8, 2, 700, 128), (4, 1, 33, 64)])
def test_attention_tells_every_querys_sum(heads, kv_heads, n, dim):
    torch.manual_seed(n)
    query = torch.randn(2, heads, n, dim, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, kv_heads, n, dim, device="cuda", dtype=torch.bfloat16)
    call = AttentionCall(query, key, value, None, lambda: None, 0.2, None, None, is_sdpa=True)
    (output, _), sums = attend_with_lse(call)
    keys, values = (t.double().repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    logits = (query.double() @ keys.transpose(2, 3) * 0.2).masked_fill(
        torch.ones(n, n, dtype=torch.bool, device="cuda").triu(1), float("-inf")
    )
    assert (sums - logits.logsumexp(-1)).abs().max() < 2e-3
    assert (output.double() - (logits.softmax(-1) @ values).transpose(1, 2)).abs().max() < 2e-2
    assert attend_with_lse(dataclasses.replace(call, is_sdpa=False)) is None
    assert attend_with_lse(dataclasses.replace(call, softcap=3.0)) is None


def test_a_kernel_started_again_is_the_one_for_its_arguments():
    """Sizes, places in memory and dtypes change from call to call; nothing compiled for others is used."""
    from kvkeep.kernels.triton import host_gather, layer_ops

    def drawn(heads, n, dim, kind, offset):
        return torch.randn(heads * n * dim + offset, device="cuda").to(kind)[offset:].view(heads, n, dim)

    kinds, sizes = (torch.float32, torch.bfloat16), ((1, 64), (16, 64), (17, 128), (1, 24), (48, 128))
    for kind, (n, dim), offset in [(k, s, o) for _ in range(3) for o in (0, 1, 8) for s in sizes for k in kinds]:
        keys, values = drawn(2, n, dim, kind, offset), drawn(2, n, 2 * dim, kind, offset)
        angle = torch.randn(n, dim // 2, device="cuda")
        for interleaved in (False, True):
            given = keys, angle.cos(), angle.sin(), interleaved, kind
            got, want = layer_ops.apply_angles(*given), elementwise.apply_angles(*given)
            bound = 2e-6 if kind == torch.float32 else 2 * torch.finfo(kind).eps  # rounded alike, unless on a verge
            assert (got.float() - want.float()).abs().max() <= bound * keys.float().abs().max()
        table = torch.empty(3, 4 + n, dtype=torch.int64, device="cuda")
        home = tuple(torch.empty(t.shape, dtype=kind, pin_memory=True) for t in (keys, values))
        host_gather.put(keys, values, home, table, 0, n)
        index = torch.randint(n, (2, n + 3), device="cuda")
        found = tuple(torch.empty(2, n + 3, t.shape[-1], dtype=kind, device="cuda") for t in (keys, values))
        host_gather.gather(index, table, 1, *found)
        torch.cuda.synchronize()
        for have, part, there in zip(found, (keys, values), home, strict=True):
            assert have.equal(part.gather(1, index[..., None].expand(-1, -1, part.shape[-1])))
            assert there.equal(part.cpu())
    ready = [len(known) for _, known in layer_ops._apply_angles.plans.values()]
    assert 1 < sum(ready) < 100  # compiled for some, started again for the others


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("spec", ["actqkv", "infllm", "qllm", "quest"])
def test_a_retrieving_batch_in_a_graph_says_what_each_says_alone(spec, monkeypatch):
    """Rows of a pool, several units offloaded while decoding, beside rows of their own caches.

    Equal tokens tie, and ties are up to rounding, in float64 too for tokenselect: the next test has none.
    """
    model, words = tiny_chat.retrieving()
    model = model.to("cuda")
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(30 + 60 * seed)) for seed in range(5)]
    pooled = kvkeep.Engine(model, words, spec, 64)
    pooled.warmup(rows=4)
    answers = pooled.generate(prompts, rows=3, max_new_tokens=60)
    batches = pooled._driver.scheduler.held.batches.values()
    assert any(runner.graph for batch in batches for runner in captured(batch))
    monkeypatch.setattr("kvkeep.cache.decode.policy.retrieval_plan", lambda cache: None)
    alone = kvkeep.Engine(model, words, spec, 64)
    assert answers == [alone.generate(prompt, max_new_tokens=60) for prompt in prompts]


@pytest.mark.parametrize("spec", ["snapkv", "quest"])
def test_penalties_count_the_tokens_of_steps_that_are_launched_ahead(spec, monkeypatch):
    """In a graph, beside rows without penalties; else each row by itself, its tokens counted on the host."""
    model, words = tiny_chat.model().to("cuda"), tiny_chat.tokenizer()
    hows = [{"repetition_penalty": 0.3}, {}, {"frequency_penalty": -2.0, "min_tokens": 20}, {"logit_bias": {90: 2.0}}]
    texts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(30 + 60 * seed)) for seed in range(4)]

    def answers(engine):
        handles = [engine.submit(text, max_new_tokens=40, **how) for text, how in zip(texts, hows, strict=True)]
        return [handle.result() for handle in handles]

    with kvkeep.Engine(model, words, spec, 64, max_rows=3) as pooled:
        pooled.warmup(rows=3)
        found = answers(pooled)
        batches = pooled._driver.scheduler.held.batches.values()
        assert any(runner.graph for batch in batches for runner in captured(batch))
    monkeypatch.setattr("kvkeep.cache.decode.policy.retrieval_plan", lambda cache: None)
    monkeypatch.setattr("kvkeep.cache.decode.policy._appends", lambda cache: False)
    with kvkeep.Engine(model, words, spec, 64) as alone:
        assert found == answers(alone)
        hows = [{}] * 4
        assert sum(a == b for a, b in zip(found, answers(alone), strict=True)) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
def test_tokens_retrieved_one_by_one_in_a_graph():
    model = make_llama(vocab_size=512).to("cuda")
    sequence = SequenceConfig(model, tiny_chat.tokenizer(), parse("tokenselect:window=16"), 64).new_sequence()
    request = Request(sequence.config, IDS[0, :200], Generation(60), sequence, keeps_cache=True)
    request.add(int(sequence.prefill(request.ids).argmax()))
    alone, batch = sequence.fork(), RetrievalBatch(sequence.cache, 2, None, None)
    assert batch.has_room(request, ())
    batch.admit(request)
    for token in IDS[0, 200:250].tolist():
        batch.runner.tokens[:] = token
        batch.launch()
        (_, follows, _), *_ = batch.collect()
        assert follows == int(alone.extend(torch.tensor([token]))[-1].argmax())
    assert batch.runner.graphs[1].graph and batch.pool.offloader.graph


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
@pytest.mark.parametrize("spec", ["lookahead", "kvkeep_lookahead"])
def test_a_captured_draft_is_the_uncaptured_one_and_is_captured_once(spec, monkeypatch):
    model, found, own, graphs = make_llama(vocab_size=512).to("cuda"), [], passes.draft_queries, []
    capture = cuda_graph.capture_graph
    monkeypatch.setattr(cuda_graph, "capture_graph", lambda *how: graphs.append(how) or capture(*how))
    monkeypatch.setattr(passes, "draft_queries", lambda caches: found.extend(own(caches)) or found[-len(caches) :])

    def read(rows, start):
        ids = torch.stack([IDS[0, row + start :][:300] for row in range(rows)])
        model(ids.cuda(), past_key_values=kvkeep.Cache(model, spec, 96))
        return found.pop()

    with monkeypatch.context() as without:
        without.setattr(draft_pool, "DEVICES", set())
        want = {(rows, start): read(rows, start) for rows in (1, 3) for start in (0, 50)}
    assert not graphs and not draft_pool.held_bytes(model)
    for rows, taken in ((1, 1), (3, 2)):
        for start in (0, 50):  # the second prompt captures nothing
            got = read(rows, start)
            assert got.keys() == want[rows, start].keys() and len(graphs) == taken
            for key, queries in want[rows, start].items():
                torch.testing.assert_close(got[key], queries, atol=2e-4, rtol=1e-3)
    assert all(runner.graph for runner in draft_pool._drafts[model].runner.graphs.values())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # compiling imports what warns
def test_a_warm_up_captures_drafts_of_packed_prompts():
    model, words = tiny_chat.model().to("cuda"), tiny_chat.tokenizer()
    engine = kvkeep.Engine(model, words, "kvkeep_lookahead", 48)
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(100 + 40 * seed)) for seed in range(5)]
    engine.warmup(rows=8)
    assert draft_pool._drafts[model].runner.graphs.keys() == {1, 2, 4, 8}
    before = dict(draft_pool._drafts[model].runner.graphs)
    answers = engine.generate(prompts, max_new_tokens=20)
    assert answers == [engine.generate(prompt, max_new_tokens=20) for prompt in prompts]
    assert draft_pool._drafts[model].runner.graphs == before


@pytest.mark.parametrize("spec", EVICTING)
def test_turns_over_a_history_in_pinned_memory_lose_nothing(spec):
    """In chunks, and after what is stored: the logits of the whole model, and the choice of a processor."""
    ids, kept = IDS[0, :300] % 250, {}
    for device in ("cpu", "cuda"):
        model, words = tiny_chat.sharp()
        engine = kvkeep.Engine(model.double().to(device), words, spec, 40, prefill_chunk_size=100)
        known = History(HostPool(torch.device(device)))
        for end in (170, 240, 300):
            sequence = sequence_after(known.until(end - 66), engine.config, ids[:end], end - 40)
            sequence.defer_eviction(end)
            logits, known = sequence.prefill(ids[:end]), sequence.history
            whole = kvkeep.Engine(model, words, "full").config.new_sequence().prefill(ids[:end])
            assert (logits - whole).abs().max() < 1e-9
            kept[device, end] = [sequence.cache.kept(i) for i in range(2)]
        assert all(block.layer(i).device.type == "cpu" for block in known.blocks for i in range(2))
        assert device == "cpu" or all(block.layer(0).is_pinned() for block in known.blocks)
    for end in (170, 240, 300):
        assert kept["cpu", end] == kept["cuda", end]


HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY


@pytest.mark.skipif(not HAS_FP8, reason="needs a GPU that multiplies 8-bit floats")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 40, 64, 65, 400])
@pytest.mark.parametrize("biased", [False, True])
def test_weights_in_8_bit_floats_are_those_of_a_processor(kind, tokens, biased):
    """But for tokens that have a number near a tie; tensor cores sum with fewer digits."""
    model = make_llama(vocab_size=512, attention_bias=biased, mlp_bias=biased).to("cuda", kind)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_()
    twin = copy.deepcopy(model).cpu()  # which rounds as often
    for each in (model, twin):
        use_weights(each, "fp8+head")
    want = twin(IDS[:, :tokens]).logits.float()
    with torch.inference_mode():
        own = model(IDS[:, :tokens].cuda()).logits.cpu().float()
        with fused_ops(model):
            assert {"LlamaDecoderLayer"} <= {type(part).__name__ for part in model.modules() if "forward" in vars(part)}
            fused = model(IDS[:, :tokens].cuda()).logits.cpu().float()
    used = dispatch.quantize_rows, dispatch.rms_norm_quantized, dispatch.gated_quantized, dispatch.fp8_linear
    assert not any(each.broken for each in used)
    for got in (own, fused):
        off = (got - want).abs().amax(-1) / want.abs().max()
        assert off.max() < 0.3 and (tokens == 1 or off.median() < 0.06)  # a single token may be one of those


@pytest.mark.skipif(not HAS_FP8, reason="needs a GPU that multiplies 8-bit floats")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_steps_in_8_bit_floats_in_a_graph_say_what_they_say_without(kind, monkeypatch):
    model, words = tiny_chat.sharp()
    model = model.to("cuda", kind)
    before = model.get_memory_footprint()
    prompts = ["".join(chr(97 + (i * i + n) % 23) for i in range(20 + 60 * n)) for n in range(3)]
    said = {}
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setattr(CudaGraphRunner, "_try", without_graph(model))
        engine = kvkeep.Engine(model, words, "snapkv", 48, max_rows=4, weights="fp8")
        engine.warmup(rows=2)
        said[graphs] = engine.generate(prompts, max_new_tokens=64)
        (batch,) = engine._driver.scheduler.held.batches.values()
        assert all((runner.graph is not None) is graphs for runner in captured(batch))
    assert said[True] == said[False] and model.get_memory_footprint() < before
