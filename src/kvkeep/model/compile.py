"""The small operations between a model's matrix products, compiled into few kernels for as long as a pass is captured.

Norms, the feed-forward part and the rotation of queries and keys are plain functions of tensors; attention, and with it
our caches, stay as they are.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvkeep.model.modules import attentions, beside_attention, instead

ROTATE = "apply_rotary_pos_emb"  # what transformers' models call it


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[None]:
    """Within, these parts of the model run compiled."""
    compiled = instead(beside_attention(model), lambda part: partial(_compiled(type(part).forward), part))
    with compiled, _rotation(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32")  # float32 was asked for
        yield


@contextmanager
def _rotation(model: PreTrainedModel) -> Iterator[None]:
    """It is a function in the file that attention's code is in."""
    files = {sys.modules[type(part).__module__] for part in attentions(model)}
    plain = {file: getattr(file, ROTATE) for file in files if hasattr(file, ROTATE)}
    for file, rotate in plain.items():
        setattr(file, ROTATE, _compiled(rotate))
    try:
        yield
    finally:
        for file, rotate in plain.items():
            setattr(file, ROTATE, rotate)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
