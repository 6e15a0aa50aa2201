"""The functions with a Triton kernel, each under one name: Triton's on a GPU, torch's elsewhere.

A kernel that is missing or fails is reported once; torch's implementation takes over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.torch import quantization, rotation
from kvkeep.kernels.torch import reference as torch_reference
from kvkeep.kernels.torch.quantization import QuantizedKV

NO_SWITCH = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager:
    """Triton launches kernels on the current device, which need not be the one a layer of a sharded model is on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return NO_SWITCH
    return torch.cuda.device(device)


def kernel(module: str, name: str) -> Callable[..., Any]:
    """A function of kernels/triton, imported on first use; raises what a missing Triton raises."""
    return getattr(import_module(f"kvkeep.kernels.triton.{module}"), name)


class KernelDispatch:
    """One function in two implementations; the device of its first argument decides."""

    def __init__(
        self,
        name: str,
        module: str,
        supports: Callable[..., bool] = lambda *_: True,
        reference: ModuleType | Callable[..., Any] = torch_reference,
    ) -> None:
        """supports: whether the kernel takes these arguments; the reference takes all others.

        reference: the torch implementation, or the module that has it under the same name
        """
        self.name, self.module, self.supports = name, module, supports
        self.reference = reference if callable(reference) else getattr(reference, name)
        self.kernel: Callable[..., Any] | None = None  # loaded on first use
        self.broken = False

    def uses_kernel(self, first: Tensor | QuantizedKV, *rest: Any) -> bool:
        return first.device.type == "cuda" and not self.broken and self.supports(first, *rest)

    def __call__(self, first: Tensor | QuantizedKV, *rest: Any) -> Any:
        if not self.uses_kernel(first, *rest):
            return self.reference(first, *rest)
        try:
            if self.kernel is None:
                self.kernel = kernel(self.module, self.name)
            with on_device(first.device):
                return self.kernel(first, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler, a driver or a missing package raises
            self.broken = True
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the kernel '{self.name}' cannot be used ({why}); torch does its work.", stacklevel=2)
            return self.reference(first, *rest)


def _single_query(queries: Tensor, *_: Any) -> bool:
    return queries.shape[2] == 1


def _dense_last_axis(vectors: Tensor, *_: Any) -> bool:
    return vectors.stride(-1) == 1


append_ragged = KernelDispatch("append_ragged", "decode")
two_region_attention = KernelDispatch("two_region_attention", "retrieval_attention", _dense_last_axis)
padded_attention = KernelDispatch("padded_attention", "decode", _single_query)
ragged_attention = KernelDispatch("ragged_attention", "decode", _single_query)
append_quantized = KernelDispatch("append_quantized", "quantized_decode", reference=quantization)
quantized_attention = KernelDispatch("quantized_attention", "quantized_decode", _single_query, quantization)
column_mass = KernelDispatch("column_mass", "column_mass")
js_distance = KernelDispatch("js_distance", "divergence")
assign = KernelDispatch("assign", "assign")
means = KernelDispatch("means", "assign")
key_similarity = KernelDispatch("key_similarity", "key_similarity")
rotate = KernelDispatch("rotate", "apply_rope", _dense_last_axis, rotation)
