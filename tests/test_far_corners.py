"""Cases that a first look passes by: layers without positions, rows unlike their batch, memory that fails once."""

import gc
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import make_llama
from families import SIZES, build, prompt, randomised

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.compress.scorers.intelllm import IntelLLMScorer
from kvkeep.model.rope import rotations
from kvkeep.storage.offload import pinned
from kvkeep.storage.offload.host import HostMemoryBudget, HostStore
from kvkeep.types import PAD_POSITION, Observation

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDES = {
    "num_hidden_layers": 3,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def sliding(kind, **settings):
    """Layers that rotate their keys in the window, and one without positions."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | SLIDES | settings)
    return randomised(getattr(transformers, f"{kind}ForCausalLM")(config))


@pytest.mark.core
@pytest.mark.parametrize("kind", ["Cohere2", "Exaone4", "ExaoneMoe", "Cohere2Moe"])
def test_layers_are_asked_whether_they_rotate(kind):
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = sliding(kind, **EXPERTS if "Mo" in kind else {})
    assert [found is not None for found in rotations(model, [0, 1, 2]).values()] == [True, True, False]
    method, read = parse("streamingllm"), []
    for how in (method, replace(method, placement=None)):
        cache = kvkeep.Cache(model, how, 24)
        model(prompt(99), past_key_values=cache)
        read.append(model(prompt(1, seed=1), past_key_values=cache).logits)
    assert torch.equal(*read), "without positions there is nowhere to be moved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_that_hardly_turn_do_not_hide_the_others(dtype):
    model = build("qwen2").to(dtype).train()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[7::8] = 500.0  # of a slow channel, as Qwen2.5's are
    assert None not in rotations(model, [0, 1]).values()
    assert all(module.training for module in model.modules()), "left as it was found"


@pytest.mark.core
@pytest.mark.parametrize("spec", ["quest", "clusterkv", "infllm", "actqkv", "tokenselect"])
def test_a_row_with_one_token_writes_whatever_the_others_bring(spec):
    model, ids = make_llama(), torch.randint(0, 128, (2, 96), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 96, dtype=torch.long)
    mask[0, 90:95] = 0  # the first row brings one token, the second six
    settings = {} if spec in ("quest", "clusterkv") else {"window": 16}
    together, alone = (kvkeep.Cache(model, spec, 40, **settings) for _ in range(2))
    model(ids[:, :90], past_key_values=together)
    places = (mask.cumsum(1) - 1)[:, 90:]
    got = model(ids[:, 90:], attention_mask=mask, position_ids=places, past_key_values=together).logits[0, -1]
    model(ids[:1, :90], past_key_values=alone)
    want = model(ids[:1, 95:], past_key_values=alone).logits[0, -1]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert together.report().tokens[0][0] == alone.report().tokens[0][0]


def test_a_block_that_could_not_be_made_ahead_is_done_without(monkeypatch):
    sizes, make = [], pinned._allocate_pinned

    def full_for_once(size, device):
        sizes.append(size)
        if len(sizes) == 2:
            raise MemoryError("no room for the block ahead")
        return make(size, device)

    monkeypatch.setattr(pinned, "_allocate_pinned", full_for_once)
    arena = pinned.Arena(CPU)
    arena.allocate((pinned.SMALLEST,), torch.uint8)
    assert arena.allocate((1000,), torch.uint8).shape == (1000,)
    assert sizes[2] == 1024, "what was asked for, no more"
    assert arena.allocate((5, 1000), torch.float32).shape == (5, 1000), "and then as before"


def test_what_was_not_stored_is_not_paid_for(monkeypatch):
    host_budget, keys = HostMemoryBudget(10_000), torch.zeros(1, 10, 8)

    def full(*_):
        raise MemoryError("no host memory just now")

    monkeypatch.setattr(HostStore, "_copy_to_host", full)
    with pytest.raises(MemoryError):
        HostStore(host_budget, CPU).put(keys, keys)
    assert host_budget.used_bytes == 0


def test_a_file_goes_with_its_slab(tmp_path):
    model = make_llama()
    cache = kvkeep.Cache(model, "infllm", 64, host_limit=1000, disk=tmp_path, window=32)
    written = []
    for _ in range(3):
        model(torch.arange(300)[None] % 128, past_key_values=cache)
        written.append(len(list(tmp_path.rglob("*.safetensors"))))
        cache.reset()
        gc.collect()
        assert not list(tmp_path.rglob("*.safetensors"))
    assert written[0] > 0 and len(set(written)) == 1


@pytest.mark.parametrize("mode", ["global", "local"])
@pytest.mark.parametrize("lengths, near", [((64, 40), None), ((64, 20), None), ((64, 64), 7), ((64, 40), 0)])
def test_gravity_is_hidden_at_the_end_of_each_head(lengths, near, mode):
    torch.manual_seed(0)
    keys, queries, seq_len, head, budget = torch.randn(2, 64, 8), torch.randn(2, 16, 8) * 3, 80, 6, 48
    positions = torch.full((2, 64), PAD_POSITION)
    for i, n in enumerate(lengths):
        positions[i, :n] = torch.arange(seq_len - n, seq_len)
    seen = Observation(queries, keys, keys, positions, lengths, seq_len, 16, 8**-0.5)
    got = IntelLLMScorer(16, head, near, mode)(seen, budget)
    near = budget // 2 if near is None else near
    for i, n in enumerate(lengths):
        index = torch.arange(64)
        first, last = index < head, index >= n - near
        late = positions[i] > torch.arange(seq_len - 16, seq_len)[:, None]
        logits = (queries[i] @ keys[i].T) * 8**-0.5
        chances = logits.masked_fill(late | (last if mode == "global" else first), float("-inf")).softmax(-1)
        want = chances.nan_to_num(0).masked_fill(first | last, 0.0).sum(0)
        torch.testing.assert_close(got[i], want, atol=1e-5, rtol=0)


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
    general.backend.step_evictor.supported, general.backend.step_evictor.can_append = False, lambda *_: False
    for cache in (fast, general):
        model(prompt(60, rows=2), past_key_values=cache)
        for token in prompt(8, rows=2, seed=2).split(1, 1):
            model(token, past_key_values=cache)
    for layer in fast.compressed_layers:
        assert fast.kept(layer) == general.kept(layer)
        for a, b in zip(fast.backend.store[layer].row(1), general.backend.store[layer].row(1), strict=True):
            order = a.token_positions.argsort()
            torch.testing.assert_close(a.token_state[order], b.token_state, atol=1e-5, rtol=1e-4)
