"""Triton's compiler takes every kernel for an H200, without one: its interpreter takes kernels that it refuses."""

import re
from functools import partial
from pathlib import Path

import launches
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

import kvkeep.kernels.triton  # noqa: E402
from kvkeep.kernels import dispatch  # noqa: E402
from kvkeep.kernels.triton import common  # noqa: E402

H200 = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # bytes, the most that a program may have there
FILES = sorted(Path(kvkeep.kernels.triton.__file__).parent.glob("*.py"))
KERNELS = {  # names of those in each module
    file.stem: found
    for file in FILES
    if (found := re.findall(r"^@kernel\(.*\)\ndef (\w+)", file.read_text(), re.MULTILINE))
}
PARTS = [sorted(KERNELS)[i::4] for i in range(4)]  # of four processes


def why_not():
    """What keeps Triton from compiling here, if anything does."""
    if common.INTERPRETED:
        return "Triton interprets in this process"
    try:
        return "" if Path(triton.knobs.nvidia.ptxas.path).exists() else "there is no ptxas"
    except (AttributeError, RuntimeError) as error:
        return f"this Triton has no ptxas for this platform: {error}"


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


class NoDevice:
    """What Triton asks a driver for before it compiles, of an H200 that is not there."""

    def get_current_target(self):
        return H200

    def get_current_device(self):
        return "none"  # kernels of a device that is there are kept apart

    def get_current_stream(self, device):
        return 0


class Compiler:
    """Compiles what launches would start, and notes what is refused."""

    def __init__(self):
        self.seen, self.refused = set(), {}

    def launch(self, kernel, *args, **options):
        name = kernel.fn.__module__.rpartition(".")[2], kernel.fn.__name__
        self.seen.add(name)
        try:
            shared = kernel.run(*args, grid=(1,), warmup=True, **options).metadata.shared
        except Exception as error:  # whatever the compiler raises
            self.refused[name] = f"{type(error).__name__}: {error}"
            return
        if shared > SHARED_MEMORY:
            self.refused[name] = f"a program takes {shared} bytes of shared memory"


@pytest.fixture
def compiler(monkeypatch):
    """One that takes the place of all launches."""
    made = Compiler()
    monkeypatch.setattr(driver, "_active", NoDevice())
    monkeypatch.setattr(common.FastLauncher, "__getitem__", lambda self, grid: partial(made.launch, self.kernel))
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: partial(made.launch, self))
    return made


def start(function, *args):
    """Call what starts kernels, with arguments that it takes."""
    if isinstance(function, str):
        function = getattr(dispatch, function)
    if isinstance(function, dispatch.KernelDispatch):
        assert function.supports(*args), function.name
        function = function.kernel
    function(*args)


def compile_all(modules, kind, compiler):
    for module in modules:
        for options in (False, True):
            for call in getattr(launches, module)(kind, options):
                start(*call)
    refused = [f"{module}.{kernel}: {why}" for (module, kernel), why in compiler.refused.items()]
    assert not refused, "\n\n".join(refused)


def test_every_kernel_is_known_here():
    for file in FILES:
        assert file.read_text().count("\n@kernel(") == len(KERNELS.get(file.stem, ())), file
    assert KERNELS.keys() <= vars(launches).keys()


def test_every_function_with_a_kernel_is_called():
    kinds = dispatch.KernelDispatch, dispatch.Kernel
    table = {name for name, each in vars(dispatch).items() if isinstance(each, kinds)}
    called = {name for module in KERNELS for name, *_ in getattr(launches, module)(torch.bfloat16, False)}
    by_torch = {"chunk_attention", "attention_and_lse", "appended_attention"}  # start `merge`, too
    assert table - by_torch == {name for name in called if isinstance(name, str)}


@pytest.mark.parametrize("modules", PARTS, ids=" ".join)
def test_every_kernel_compiles(modules, compiler):
    compile_all(modules, torch.bfloat16, compiler)
    assert {(module, kernel) for module in modules for kernel in KERNELS[module]} <= compiler.seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("modules", PARTS, ids=" ".join)
def test_every_kernel_compiles_for_other_dtypes(modules, kind, compiler):
    compile_all(modules, kind, compiler)
