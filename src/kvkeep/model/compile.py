"""torch.compile for the small operations between a model's matrix products, while a CUDA graph is captured.

Norms, MLP and the rotation of queries and keys are pure functions of tensors; attention, and with it the cache, is not
compiled.
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

from kvkeep.model.modules import attention_modules, other_modules, replace_forward

ROPE = "apply_rotary_pos_emb"  # its name in transformers' models


@contextmanager
def compiled_ops(model: PreTrainedModel) -> Iterator[None]:
    """Within, norms, MLP and RoPE run compiled."""
    compiled = replace_forward(other_modules(model), lambda module: partial(_compiled(type(module).forward), module))
    with compiled, _compiled_rope(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32")  # the model's float32 is intended
        yield


@contextmanager
def _compiled_rope(model: PreTrainedModel) -> Iterator[None]:
    """RoPE is a function in the file of the attention modules."""
    files = {sys.modules[type(module).__module__] for module in attention_modules(model)}
    uncompiled = {file: getattr(file, ROPE) for file in files if hasattr(file, ROPE)}
    for file, rotate in uncompiled.items():
        setattr(file, ROPE, _compiled(rotate))
    try:
        yield
    finally:
        for file, rotate in uncompiled.items():
            setattr(file, ROPE, rotate)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
