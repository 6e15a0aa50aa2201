"""What the kernels share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its matrix products do not know bfloat16
AT_LEAST = 16  # rows of a matrix product


def cdiv(n: int, size: int) -> int:
    """How many of a size hold n. Triton's own, made for kernels, takes microseconds."""
    return -(-n // size)


def power(n: int) -> int:
    """The least power of two that is n or more; n is at least 1."""
    return 1 << (n - 1).bit_length()


def quick(kernel: Any) -> Any:
    """A kernel whose start costs the processor little. As it is where nothing is compiled, or Triton is old."""
    known = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
    return Launch(kernel) if known and isinstance(kernel, JITFunction) else kernel


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """a @ b, exact to float32 whatever the types: one that has more digits than the other is cut in three."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if a.dtype == b.dtype:
        return tl.dot(a, b, input_precision="tf32x3").to(tl.float32)  # of float32; on tensor cores all the same
    if a.dtype == tl.float32:
        high, middle, low = thirds(a, b.dtype)
        return (tl.dot(low, b) + tl.dot(middle, b) + tl.dot(high, b)).to(tl.float32)
    high, middle, low = thirds(b, a.dtype)
    return (tl.dot(a, low) + tl.dot(a, middle) + tl.dot(a, high)).to(tl.float32)


@triton.jit
def thirds(x, KIND: tl.constexpr):
    """float32 as a sum of three numbers of half its size."""
    high = x.to(KIND)
    rest = x - high.to(tl.float32)
    middle = rest.to(KIND)
    return high, middle, (rest - middle.to(tl.float32)).to(KIND)


@triton.jit
def capped(logits, softcap, CAPPED: tl.constexpr):
    """softcap * tanh(logits / softcap), where there is one."""
    if CAPPED:
        logits = softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)
    return logits


# Of an argument a[i], all that Triton compiles a kernel anew for. Its type is known.
TENSOR = "a[{0}].dtype, a[{0}].data_ptr() % 16 == 0"
SIZE = "-0x80000000 <= a[{0}] < 0x80000000 or 2 + (a[{0}] < 0x8000000000000000)"  # 32 bits, 64, or 64 without a sign
NUMBER = "a[{0}] == 1, a[{0}] % 16 == 0, " + SIZE
VALUE = "a[{0}]"
PLAIN = bool, int, float, type(None)


class Launch:
    """A kernel that starts at once what Triton compiled for arguments alike to these.

    Triton examines every argument of every launch, which takes tens of microseconds. Here each list of types gets a
    function that looks only at what matters; where it saw the same before, what was compiled is run as Triton would.
    All parameters are given by position. Triton's settings (debugging, say) stay those of the first launch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.plans: dict[tuple[type, ...], tuple[Callable[..., Any] | None, dict[Any, Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._start, *(*grid, 1, 1)[:3])

    def _start(self, x: int, y: int, z: int, *args: Any, **options: Any) -> None:
        types = tuple(map(type, args))
        plan = self.plans.get(types)
        if plan is None:
            plan = self.plans[types] = self._look(args), {}
        look, known = plan
        if look is None or self._watched():
            self.kernel[x, y, z](*args, **options)
            return
        device = driver.active.get_current_device()
        key = device, look(args), *options.items()
        ready = known.get(key)
        if ready is not None:
            _, run, function, metadata = ready
            run(x, y, z, driver.active.get_current_stream(device), function, metadata, None, None, None, *args)
            return
        made = self.kernel[x, y, z](*args, **options)
        if made is not None and made.metadata.target.backend == "cuda":  # others look at more
            known[key] = made, made.run, made.function, made.packed_metadata  # it is unloaded where nobody holds it

    def _look(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """A function of arguments of these types; None where we do not know what Triton looks at."""
        params, looks = self.kernel.params, []
        if len(args) != len(params):
            return None
        for i, (arg, param) in enumerate(zip(args, params, strict=True)):
            if isinstance(arg, Tensor) and not param.is_constexpr:
                looks.append(TENSOR.format(i))
            elif type(arg) not in PLAIN:
                return None
            elif param.is_constexpr:
                looks.append(VALUE.format(i))
            elif type(arg) is int:
                looks.append((SIZE if param.do_not_specialize else NUMBER).format(i))
        return eval(f"lambda a: ({''.join(look + ', ' for look in looks)})")

    def _watched(self) -> bool:
        """Whether somebody follows launches, as profilers do: Triton tells them, and may compile otherwise for them."""
        now = triton.knobs.runtime
        if self.kernel.pre_run_hooks or now.add_stages_inspection_hook is not None:
            return True
        return _used(now.launch_enter_hook) or _used(now.launch_exit_hook)


def _used(hook: Any) -> bool:
    """A hook may be a chain of them, which may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))
