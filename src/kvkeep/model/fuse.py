"""The small operations between a model's matrix products, compiled into few kernels for as long as a pass is captured.

What a decoder layer has beside attention (norms, the feed-forward part) and the rotation of queries and keys are plain
functions of tensors; attention, and with it our caches, stay as they are.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

ROTATE = "apply_rotary_pos_emb"  # what transformers' models call it


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[None]:
    """Within, these parts of the model run compiled."""
    parts, files = _parts(model)
    rotations = {file: getattr(file, ROTATE) for file in files}
    for part in parts:
        part.forward = partial(_compiled(type(part).forward), part)
    for file, plain in rotations.items():
        setattr(file, ROTATE, _compiled(plain))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32")  # float32 was asked for
            yield
    finally:
        for part in parts:
            del part.forward
        for file, plain in rotations.items():
            setattr(file, ROTATE, plain)


def _parts(model: PreTrainedModel) -> tuple[list[nn.Module], set[Any]]:
    """What lies beside attention in every layer, and the files that attention's code is in."""
    parts, files = [], set()
    for layer in model.modules():
        attention = [part for part in layer.children() if hasattr(part, "layer_idx")]
        if attention:
            parts += [part for part in layer.children() if part not in attention and "forward" not in vars(part)]
            files |= {sys.modules[type(part).__module__] for part in attention}
    return parts, {file for file in files if hasattr(file, ROTATE)}


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
