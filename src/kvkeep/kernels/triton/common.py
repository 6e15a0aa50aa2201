"""What starts Triton kernels: sizes of blocks, and a launcher with little host overhead."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction, driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its matrix products do not support bfloat16
MIN_BLOCK = 16  # rows of a matrix product, at least


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up. triton.cdiv, made for kernels, takes microseconds on the host."""
    return -(-n // size)


def pow2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def padded(n: int) -> int:
    """The side of a matrix product that has room for n: a power of two, and not below what the hardware multiplies."""
    return max(MIN_BLOCK, pow2(n))


def floats(like: Tensor, *shape: int) -> Tensor:
    """An uninitialized float32 tensor on the device of another."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def kernel(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Decorate a function as a Triton kernel, started by a FastLauncher where this Triton has what one needs.

    do_not_specialize: numbers that differ from call to call, for which Triton shall not compile the kernel again
    """

    def decorate(function: Callable[..., None]) -> Any:
        return fast_launch(triton.jit(function, do_not_specialize=do_not_specialize))

    return decorate


def fast_launch(kernel: Any) -> Any:
    """Wrap a kernel in a FastLauncher; unchanged under the interpreter and before Triton 3.6."""
    supported = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
    return FastLauncher(kernel) if supported and isinstance(kernel, JITFunction) else kernel


# What Triton specializes a kernel for, of an argument a[i] of known type.
TENSOR = "a[{0}].dtype, a[{0}].data_ptr() % 16 == 0"
SIZE = "-0x80000000 <= a[{0}] < 0x80000000 or 2 + (a[{0}] < 0x8000000000000000)"  # int32, int64 or uint64
NUMBER = "a[{0}] == 1, a[{0}] % 16 == 0, " + SIZE
VALUE = "a[{0}]"
PLAIN_TYPES = bool, int, float, type(None)


class FastLauncher:
    """Launches a kernel Triton already compiled for such arguments without Triton's per-launch checks.

    Triton inspects every argument of every launch, which takes tens of microseconds. Here each tuple of argument types
    gets a function that computes the specialization key alone; a known key runs the compiled kernel as Triton would.
    All parameters are positional. Triton's settings (debugging, say) stay those of the first launch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.plans: dict[tuple[type, ...], tuple[Callable[..., Any] | None, dict[Any, Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, *(*grid, 1, 1)[:3])

    def _launch(self, x: int, y: int, z: int, *args: Any, **options: Any) -> None:
        types = tuple(map(type, args))
        plan = self.plans.get(types)
        if plan is None:
            plan = self.plans[types] = self._key_function(args), {}
        key_of, compiled_for = plan
        if key_of is None or self._has_hooks():
            self.kernel[x, y, z](*args, **options)
            return
        device = driver.active.get_current_device()
        key = device, key_of(args), *options.items()
        found = compiled_for.get(key)
        if found is not None:
            _, run, function, metadata = found
            run(x, y, z, driver.active.get_current_stream(device), function, metadata, None, None, None, *args)
            return
        compiled = self.kernel[x, y, z](*args, **options)
        if compiled is not None and compiled.metadata.target.backend == "cuda":  # other backends specialize on more
            # holding `compiled` keeps it loaded
            compiled_for[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata

    def _key_function(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """A function from arguments of these types to their specialization key; None for types not listed here."""
        params, parts = self.kernel.params, []
        if len(args) != len(params):
            return None
        for i, (arg, param) in enumerate(zip(args, params, strict=True)):
            if isinstance(arg, Tensor) and not param.is_constexpr:
                parts.append(TENSOR.format(i))
            elif type(arg) not in PLAIN_TYPES:
                return None
            elif param.is_constexpr:
                parts.append(VALUE.format(i))
            elif type(arg) is int:
                parts.append((SIZE if param.do_not_specialize else NUMBER).format(i))
        return eval(f"lambda a: ({''.join(part + ', ' for part in parts)})")

    def _has_hooks(self) -> bool:
        """Whether a profiler or inspector has hooks on launches, which only Triton's own launch path calls."""
        now = triton.knobs.runtime
        if self.kernel.pre_run_hooks or now.add_stages_inspection_hook is not None:
            return True
        return _is_set(now.launch_enter_hook) or _is_set(now.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    """A hook may be an empty chain."""
    return hook is not None and bool(getattr(hook, "calls", True))
