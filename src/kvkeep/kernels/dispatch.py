"""The functions with a fast implementation, each called by its one name: Triton's on a GPU, torch's elsewhere.

A kernel that cannot be had, or fails, is reported once and then done without.
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

from kvkeep.kernels.torch import quantization, reference, rotation
from kvkeep.kernels.torch.quantization import Packed

HERE = nullcontext()


def where(device: torch.device) -> AbstractContextManager:
    """Triton starts kernels on the current device, which need not be the one a layer of a spread model is on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


def kernel(module: str, name: str) -> Callable[..., Any]:
    """A function of kernels/triton, imported when it is first needed; raises what a missing Triton raises."""
    return getattr(import_module(f"kvkeep.kernels.triton.{module}"), name)


class Best:
    """One function in two implementations; the device of its first argument decides."""

    def __init__(
        self,
        name: str,
        module: str,
        fits: Callable[..., bool] = lambda *_: True,
        plain: ModuleType | Callable[..., Any] = reference,
    ) -> None:
        """fits: whether the kernel is made for these arguments; where it is not, torch's is the implementation.

        plain: where torch's is, or torch's itself
        """
        self.name, self.module, self.fits = name, module, fits
        self.plain = plain if callable(plain) else getattr(plain, name)
        self.kernel: Callable[..., Any] | None = None  # once it was needed
        self.broken = False

    def fast(self, first: Tensor | Packed, *rest: Any) -> bool:
        """Whether the kernel would do it."""
        return first.device.type == "cuda" and not self.broken and self.fits(first, *rest)

    def __call__(self, first: Tensor | Packed, *rest: Any) -> Any:
        if not self.fast(first, *rest):
            return self.plain(first, *rest)
        try:
            if self.kernel is None:
                self.kernel = kernel(self.module, self.name)
            with where(first.device):
                return self.kernel(first, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler, a driver or a missing package raises
            self.broken = True
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the kernel '{self.name}' cannot be used ({why}); torch does its work.", stacklevel=2)
            return self.plain(first, *rest)


append_ragged = Best("append_ragged", "decode")
attend_apart = Best("attend_apart", "retrieval_attention", lambda queries, *_: queries.stride(-1) == 1)
attend_slots = Best("attend_slots", "decode", lambda queries, *_: queries.shape[2] == 1)
attend_ragged = Best("attend_ragged", "decode", lambda queries, *_: queries.shape[2] == 1)
append_packed = Best("append_packed", "quantized_decode", plain=quantization)
attend_packed = Best("attend_packed", "quantized_decode", lambda queries, *_: queries.shape[2] == 1, quantization)
column_mass = Best("column_mass", "column_mass")
distance = Best("distance", "divergence")
assign = Best("assign", "assign")
means = Best("means", "assign")
likeness = Best("likeness", "key_similarity")
turned = Best("turned", "apply_rope", lambda vectors, *_: vectors.stride(-1) == 1, rotation)
