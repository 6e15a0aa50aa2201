"""Tensor parallelism: two processes with two of four KV heads each answer as one process with all of them.

The model computes in float64: the processes add up in another order, and a rounding must not change what is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from tensor_parallel_cases import REFUSED, SPECS, WORKING, answers, save_model
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.errors import UnsupportedModel

pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="heads are split by DTensor in transformers 5.17"
)
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
HERE = Path(__file__).parent
PER_HEAD = ["quest", "clusterkv", "squeezed", "sentencekv", "protokv+recall"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Of each of two processes: what it answered."""
    folder = tmp_path_factory.mktemp("tp")
    save_model(folder)
    paths = [str(HERE), str(HERE.parent), str(Path(kvkeep.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(HERE / "tensor_parallel_cases.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(ran):
    model = AutoModelForCausalLM.from_pretrained(ran[0], dtype=torch.float64)
    with torch.no_grad():
        return json.loads(json.dumps(answers(model)))


@pytest.mark.slow
def test_both_processes_decide_alike_on_two_heads_each(ran):
    first, second = ran[1]
    assert first["heads"] == second["heads"] == 16 and first == second


@pytest.mark.parametrize("name", [*WORKING, *PER_HEAD, "kvkeep int8", "snapkv+adakv int4", "assisted", "fused"])
def test_the_same_answers_and_the_same_tokens_kept_as_in_one_process(name, ran, alone):
    got = ran[1][0]["answers"][name]
    assert not isinstance(got, str), got
    assert got == alone[name]


@pytest.mark.parametrize("name", sorted(set(SPECS) - {*WORKING, *PER_HEAD, *REFUSED}))
def test_methods_that_retrieve_for_all_heads_at_once_are_refused(name, ran):
    refused = ran[1][0]["answers"][name]
    assert isinstance(refused, str) and f"'{name}' retrieves the same tokens for all KV heads" in refused


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_heads_of_all_processes_is_refused(name, ran):
    refused = ran[1][0]["answers"][name]
    assert isinstance(refused, str) and f"'{name}' {REFUSED[name]}" in refused


def test_what_processes_cannot_do_in_step_is_refused(ran):
    refused = ran[1][0]["refusals"]
    assert "2 processes share this model" in refused["submit"] and "use generate" in refused["submit"]
    assert "splits this cache over 2 processes" in refused["save"]


def test_a_model_that_is_split_in_another_way_is_refused():
    """Weights cut by hand; queries, keys and values in one product."""
    cut, packed = make_llama(), make_llama()
    cut.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(torch.zeros(16, 64))
    packed.model.layers[1].self_attn.qkv_proj = part = torch.nn.Linear(4, 4)
    part.weight.placements = (torch.distributed.tensor.Shard(0),)
    for model, name in ((cut, "k_proj"), (packed, "qkv_proj")):
        kvkeep.Cache(model, "snapkv", 40)
        model._device_mesh = object()
        with pytest.raises(
            UnsupportedModel, match=f"splits {name} of LlamaForCausalLM in a way that does not tell which"
        ):
            kvkeep.Cache(model, "snapkv", 40)
