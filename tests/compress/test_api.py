"""kvkeep.select: the tensors it takes, and the arguments it names when it does not."""

from __future__ import annotations

import pytest
import torch
from masked_reference import EVERY, random_qkv

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.errors import BadTensor, KvkeepError


@pytest.mark.core
def test_select_takes_any_float_layout_and_gradients():
    """Half precision, non-contiguous and gradient-carrying tensors decide like plain ones, and carry no graph on."""
    for method in (each for each in EVERY if not parse(each).needs_passes):
        q, k, v = random_qkv()
        want = kvkeep.select(method, q, k, v, 30).tolist()
        turned = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in (q, k, v)]
        chosen = kvkeep.select(method, *turned, 30)
        assert chosen.tolist() == want and not chosen.index.requires_grad
        half = [t.half() for t in (q, k, v)]
        same = [t.float() for t in half]
        assert kvkeep.select(method, *half, 30).tolist() == kvkeep.select(method, *same, 30).tolist()


@pytest.mark.core
def test_wrong_kinds_of_arguments_are_named(model):
    """Not a method, not a model, not a scale: errors of ours that say so."""
    q, k, v = random_qkv()
    for attempt in (
        lambda: kvkeep.Cache(model, None, budget=3),
        lambda: kvkeep.Cache("gpt2", "snapkv", budget=3),
        lambda: kvkeep.select("snapkv", q, k, v, 30, scale=float("nan")),
        lambda: kvkeep.select("snapkv", q, k, v, 30, layer=0.5, layers=2),
        lambda: kvkeep.select("snapkv", q[..., :0], k[..., :0], v, 30),
    ):
        with pytest.raises(KvkeepError):
            attempt()
    dim = q.shape[-1]
    for how, says in (
        ({"frequencies": torch.ones(dim)}, rf"frequencies has shape \({dim},\); pass \[{dim // 2}\]"),
        ({"frequencies": [1.0]}, "frequencies is a list; pass a floating-point torch tensor"),
        ({"output_weight": [[[1.0]]]}, "output_weight is a list; pass a floating-point torch tensor"),
    ):
        with pytest.raises(BadTensor, match=says):
            kvkeep.select("snapkv+critical" if "output_weight" in how else "echo", q, k, v, 30, **how)
    assert kvkeep.select("echo", q, k, v, 30, frequencies=torch.ones(dim // 4)).lengths  # half of the channels turn
    numpy = pytest.importorskip("numpy")
    assert len(kvkeep.select("snapkv", q, k, v, numpy.int64(30)).tolist()[0]) == 30
