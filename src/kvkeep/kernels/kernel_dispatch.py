"""One function in two implementations, Triton's and torch's, and the choice between them.

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
    """One function in two implementations; the device of its first argument, a tensor or a quantized cache, decides."""

    def __init__(
        self,
        name: str,
        module: str,
        supports: Callable[..., bool] = lambda *_: True,
        reference: ModuleType | Callable[..., Any] | None = None,
    ) -> None:
        """supports: whether the kernel takes these arguments; the reference takes all others.

        reference: the torch implementation, or the module that has it under the same name; None: torch/reference.py
        """
        self.name, self.module, self.supports = name, module, supports
        reference = reference or import_module("kvkeep.kernels.torch.reference")
        self.reference = reference if callable(reference) else getattr(reference, name)
        self.kernel: Callable[..., Any] | None = None  # loaded on first use
        self.broken = False

    def uses_kernel(self, first: Any, *rest: Any) -> bool:
        return first.device.type == "cuda" and not self.broken and self.supports(first, *rest)

    def __call__(self, first: Any, *rest: Any) -> Any:
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
