"""One contract for every policy of decode steps, on every family of models: rows in a batch are what each is alone."""

import pytest
import torch
import transformers
from families import FAMILIES, SIZES, randomised
from test_step_pool import Words, alone, ids

from kvkeep.cache.decode.policy import Policy
from kvkeep.compress.parse import parse
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig

LENGTHS, NEW = (30, 70, 110), 24
CASES = [  # policy, method, options of its cache
    (Policy.APPEND, "snapkv", {}),
    (Policy.APPEND, "snapkv+adakv", {}),
    (Policy.APPEND, "full", {}),
    (Policy.APPEND, "snapkv", {"storage": "int8"}),
    (Policy.EVICT_ONE, "h2o", {}),
    (Policy.EVICT_ONE, "ahakv", {}),
    (Policy.EVICT_ONE, "tova", {}),
    (Policy.EVICT_ONE, "streamingllm", {}),
    (Policy.VOTE, "snapkv:window=8", {"schedule": "step"}),
    (Policy.VOTE, "snapkv:window=8:pooling=max+adakv+sinks", {"schedule": "step"}),
    (Policy.EVICT, "rkv:window=4", {"schedule": 6}),
    (Policy.EVICT, "snapkv+adakv", {"schedule": 6}),
    (Policy.RETRIEVE, "quest", {}),
    (Policy.RETRIEVE, "infllm", {}),
    (Policy.ALONE, "h2o+adakv", {}),
]
NAMES = [f"{policy.value}: {spec} {options or ''}".strip() for policy, spec, options in CASES]
WHOLE = ["llama", "qwen3_moe", "gemma2", "cohere", "smollm3", "gpt_oss"]


def with_full_attention(family):
    """A tiny model of a family, with full attention in each of its four layers."""
    kind, settings = FAMILIES[family].kind, FAMILIES[family].settings
    full = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 0, 1, 1]}
    own = {name: value for name, value in full.items() if name != "no_rope_layers" or name in settings}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings, **own})
    model = randomised(getattr(transformers, f"{kind}ForCausalLM")(config))
    if "num_experts_per_tok" not in settings:  # the product of experts has no float64
        model.double()
    model.set_attn_implementation("eager")
    if family == "llama":
        model.model.layers[1].self_attn.scaling = 0.7  # one layer has a scale of its own
    return model


def rehearse(batch):
    """Make the forward passes that a graph is captured from, between two steps of rows in use."""
    rows = max(batch.by_row, default=-1) + 1
    if not rows:
        return
    tokens, positions = (part[:rows].clone() for part in (batch.runner.tokens, batch.runner.positions))
    with batch.pool.graph_capture_scratch(), torch.inference_mode():
        for _ in range(2):
            batch.model(tokens, position_ids=positions, past_key_values=batch.pool)


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize(("policy", "spec", "options"), CASES, ids=NAMES)
def test_rows_of_a_batch_are_what_each_is_alone(policy, spec, options, family, monkeypatch):
    """Whoever comes and goes, also where steps are captured in between; their caches go on as if they had decoded."""
    monkeypatch.setattr("kvkeep.cache.decode.evict_one.BLOCK_LAYERS", {"cpu": 3})  # blocks of three layers and of one
    model = with_full_attention(family)
    config = SequenceConfig(model, Words(), parse(spec), 40, cache_options=options)
    requests = [
        Request(config, ids(n, length), Generation(NEW + n), keeps_cache=True) for n, length in enumerate(LENGTHS)
    ]
    work = Scheduler(model, set(), max_rows=2)
    for request in requests:
        work.submit(request)
    seen = set()
    while work.held.num_requests:
        work.step()
        for batch in work.held.batches.values():
            if hasattr(batch, "runner"):
                rehearse(batch)
        seen |= set(work.held.batches)
    assert not [request.error for request in requests if request.error]
    assert {name.split(":")[0] for name in seen} == {policy.value}
    assert all(not batch.requests for batch in work.held.batches.values())
    for request in requests:
        sequence, written = alone(request)
        mine, theirs = request.sequence.cache, sequence.cache
        assert request.answer.ids == written and request.sequence.token_ids == sequence.token_ids
        assert [mine.kept(i) for i in range(4)] == [theirs.kept(i) for i in range(4)]
        got, want = (each.extend(ids(9, 5)) for each in (request.sequence, sequence))
        close = {"atol": 2e-3, "rtol": 2e-2} if "storage" in options else {"atol": 2e-5, "rtol": 1e-4}
        torch.testing.assert_close(got, want, **close)  # keys are rotated in float32; codes round what differs
        assert [mine.kept(i) for i in range(4)] == [theirs.kept(i) for i in range(4)]
