"""A kernel is started without Triton exactly where Triton would start what it compiled before."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402

from kvkeep.kernels.triton import common, tiles  # noqa: E402
from kvkeep.kernels.triton.common import FastLauncher, cdiv, pow2  # noqa: E402

KINDS = ["tensor", "number", "free", "scale", "FIXED"]  # of the parameters of the kernel below
EDGES = [2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**31) - 1, -(2**63)]
MEMORY = torch.zeros(64)


def param(name):
    return SimpleNamespace(is_constexpr=name.isupper(), do_not_specialize=name == "free")


class Kernel:
    """Triton's, as far as it is called: notes who came this way, and hands out something compiled for each."""

    def __init__(self, names=KINDS, backend="cuda"):
        self.params, self.pre_run_hooks, self.backend = [param(name) for name in names], [], backend
        self.slow, self.fast = [], []

    def __getitem__(self, grid):
        return lambda *args, **options: self.compiled(grid, args, options)

    def compiled(self, grid, args, options):
        self.slow.append((grid, args, options))
        name = f"function {len(self.slow)}"
        target = SimpleNamespace(target=SimpleNamespace(backend=self.backend))
        return SimpleNamespace(
            run=lambda *a: self.fast.append(a), function=name, packed_metadata=f"of {name}", metadata=target
        )


@pytest.fixture
def device(monkeypatch):
    """The current device: one may be set."""
    now = SimpleNamespace(index=0)
    active = SimpleNamespace(get_current_device=lambda: now.index, get_current_stream=lambda i: f"stream {i}")
    monkeypatch.setattr(common, "driver", SimpleNamespace(active=active))
    return now


def at(offset, kind=torch.float32):
    """A tensor that begins so many bytes behind an aligned place."""
    return MEMORY.view(torch.uint8)[offset : offset + 16].view(kind)


USUAL = dict(tensor=at(0), number=32, free=32, scale=0.5, FIXED=8)


def launch(kernel, grid=(3,), num_warps=4, **changes):
    kernel[grid](*{**USUAL, **changes}.values(), num_warps=num_warps)


def test_alike_arguments_go_the_short_way(device):
    kernel = Kernel()
    quick = FastLauncher(kernel)
    alike = [{}, {"tensor": at(16)}, {"number": 48}, {"free": 1}, {"free": 33}, {"scale": -1.0}, {"free": -5}]
    for changes in alike:
        launch(quick, **changes)
    assert len(kernel.slow) == 1 and len(kernel.fast) == len(alike) - 1
    start = (3, 1, 1, "stream 0", "function 1", "of function 1", None, None, None)
    for (*head, tensor, number, free, scale, fixed), changes in zip(kernel.fast, alike[1:], strict=True):
        want = {**USUAL, **changes}
        assert tuple(head) == start and tensor is want["tensor"]
        assert (number, free, scale, fixed) == tuple(want.values())[1:]


def test_the_grid_is_given_as_it_is(device):
    kernel = Kernel()
    quick = FastLauncher(kernel)
    for grid in [(2,), (3, 4), (5, 6, 7), (8,)]:
        launch(quick, grid)
    assert kernel.slow[0][0] == (2, 1, 1) and kernel.slow[0][2] == {"num_warps": 4}
    assert [call[:3] for call in kernel.fast] == [(3, 4, 1), (5, 6, 7), (8, 1, 1)]


DIFFERENT = [
    {"tensor": at(0, torch.float16)},
    {"tensor": at(4)},
    {"tensor": None},
    {"number": 1},
    {"number": 2},
    {"number": 17},
    {"number": 2**31},
    {"number": 2**31 + 1},
    {"number": 2**63},
    {"number": True},
    {"number": 32.0},
    {"number": None},
    {"free": 2**31},
    {"free": -(2**31) - 1},
    {"free": 2**63},
    {"free": True},
    {"scale": 1},
    {"FIXED": 16},
    {"FIXED": 8.0},
    {"FIXED": None},
    {"num_warps": 8},
    {"num_stages": 2},
    {"device": 1},
]


@pytest.mark.parametrize("changes", DIFFERENT, ids=str)
def test_what_triton_tells_apart_is_compiled_by_itself(changes, device, monkeypatch):
    kernel = Kernel()
    quick, stream = FastLauncher(kernel), f"stream {changes.get('device', 0)}"

    def changed():
        options = {name: value for name, value in changes.items() if name.startswith("num_")}
        values = {name: changes.get(name, value) for name, value in USUAL.items()}
        monkeypatch.setattr(device, "index", changes.get("device", 0))
        quick[3,](*values.values(), **{"num_warps": 4, **options})
        device.index = 0

    launch(quick)
    changed()
    assert len(kernel.slow) == 2 and not kernel.fast
    changed()
    launch(quick)
    assert len(kernel.slow) == 2  # once each
    assert [call[3:5] for call in kernel.fast] == [(stream, "function 2"), ("stream 0", "function 1")]


def test_one_number_after_the_other(device):
    kernel = Kernel()
    quick = FastLauncher(kernel)
    for number in (1, 2, 16, 17, 2**31, 2**31 + 1, 2**63, 2**63 + 1) * 2:
        launch(quick, number=number)
    order = [1, 2, 3, 2, 4, 5, 6, 7]  # 17 is like 2
    assert len(kernel.slow) == 7
    assert [call[4] for call in kernel.fast] == [f"function {i}" for i in (2, *order)]


@pytest.mark.parametrize("args", [(at(0), 32, 32, 0.5), (at(0), 32, 32, 0.5, (8,)), (at(0), "32", 32, 0.5, 8)], ids=str)
def test_what_we_do_not_know_is_left_to_triton(args, device):
    """A parameter given by its name, and types that none of our kernels takes."""
    kernel, named = Kernel(), {} if len(args) == 5 else {"FIXED": 8}
    quick = FastLauncher(kernel)
    for _ in range(3):
        quick[3,](*args, **named)
    assert len(kernel.slow) == 3 and not kernel.fast


@pytest.mark.parametrize("backend, short", [("cuda", 2), ("hip", 0)])
def test_other_makes_of_gpu_are_left_to_triton(backend, short, device):
    """AMD's also looks at how large a tensor is."""
    kernel = Kernel(backend=backend)
    quick = FastLauncher(kernel)
    for _ in range(3):
        launch(quick)
    assert len(kernel.fast) == short


@pytest.mark.parametrize("where", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks", "plain"])
def test_who_follows_launches_sees_them_all(where, device, monkeypatch):
    kernel, runtime = Kernel(), triton.knobs.runtime
    quick = FastLauncher(kernel)
    launch(quick)
    launch(quick)
    assert (len(kernel.slow), len(kernel.fast)) == (1, 1)
    with monkeypatch.context() as patch:
        if where == "pre_run_hooks":
            patch.setattr(kernel, where, [print])
        elif where == "plain":
            patch.setattr(runtime, "launch_enter_hook", print)
        else:
            patch.setattr(getattr(runtime, where), "calls", [print])
        launch(quick)
        launch(quick, FIXED=16)  # may be compiled otherwise for them: not remembered
    assert (len(kernel.slow), len(kernel.fast)) == (3, 1)
    launch(quick)
    launch(quick, FIXED=16)
    assert (len(kernel.slow), len(kernel.fast)) == (4, 2)


def test_a_kernel_that_was_not_compiled_is_not_remembered(device, monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(kernel, "compiled", lambda *_: kernel.slow.append(1))
    quick = FastLauncher(kernel)
    launch(quick)
    launch(quick)
    assert len(kernel.slow) == 2


def test_a_kernel_that_fails_is_not_remembered(device, monkeypatch):
    kernel = Kernel()
    quick = FastLauncher(kernel)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "compiled", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            launch(quick)
    launch(quick)
    assert len(kernel.slow) == 1 and not kernel.fast


# What Triton itself says


def seen(names, args):
    """All that we tell apart."""
    look = FastLauncher(Kernel(names))._key_function(args)
    return tuple(map(type, args)), look(args)


def specialised(names, args):
    """All that Triton tells apart, in the words of its binder."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    if not hasattr(libtriton, "native_specialize_impl"):
        pytest.skip("this Triton examines arguments in Python")
    from triton.backends.compiler import BaseBackend

    return [
        ("constexpr", type(arg), arg)
        if name.isupper()
        else libtriton.native_specialize_impl(BaseBackend, arg, False, name != "free", True)
        for name, arg in zip(names, args, strict=True)
    ]


TENSORS = st.builds(at, st.sampled_from([0, 8, 16, 24]), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
NUMBERS = st.builds(int.__add__, st.sampled_from([0, *EDGES]), st.integers(-33, 33)).filter(
    lambda n: -(2**63) <= n < 2**64
)
VALUES = st.sampled_from([True, False, 0, 1, 16, 1.0, 0.5, None])


def drawn(name):
    """Mostly what such a parameter is for, but anything may come."""
    usual = {"tensor": TENSORS, "scale": st.floats(allow_nan=False), "FIXED": VALUES}.get(name, NUMBERS)
    return usual if name == "FIXED" else st.one_of(usual, usual, usual, VALUES, TENSORS)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.data())
def test_who_looks_the_same_to_us_is_the_same_to_triton(data):
    names = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    some = [data.draw(drawn(name)) for name in names]
    others = [data.draw(st.one_of(st.just(arg), drawn(name))) for name, arg in zip(names, some, strict=True)]
    if seen(names, some) == seen(names, others):
        assert specialised(names, some) == specialised(names, others)


@pytest.mark.parametrize("name", ["number", "free"])
def test_every_number_near_an_edge(name):
    """Sorted by what we see of them, each heap is one to Triton; and we keep no more heaps than it does."""
    heaps = {}
    for n in sorted({edge + step for edge in (0, *EDGES) for step in range(-40, 41)}):
        if -(2**63) <= n < 2**64:
            heaps.setdefault(seen([name], (n,)), []).append(n)
    theirs = [{str(specialised([name], (n,))) for n in heap} for heap in heaps.values()]
    assert all(len(heap) == 1 for heap in theirs)
    assert len(set.union(*theirs)) == len(heaps) == (7 if name == "number" else 3)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_every_place_a_tensor_can_begin(kind):
    heaps = {}
    for offset in range(0, 64, kind.itemsize):
        arg = (at(offset, kind),)
        heaps.setdefault(seen(["tensor"], arg), set()).add(str(specialised(["tensor"], arg)))
    assert [len(heap) for heap in heaps.values()] == [1, 1]


# The rest


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 64, 100, 4095, 4096, 4097, 2**31])
def test_host_functions_are_tritons(n):
    assert pow2(n) == triton.next_power_of_2(n)
    assert [cdiv(n, size) for size in (1, 3, 8, 64)] == [triton.cdiv(n, size) for size in (1, 3, 8, 64)]


@pytest.mark.skipif(
    not isinstance(common.fast_launch(tiles.dot), FastLauncher), reason="nothing is compiled, or by an old Triton"
)
def test_kernels_of_reading_and_writing_are_quick():
    for name in (
        "column_mass",
        "decode",
        "divergence",
        "host_gather",
        "evict_voted",
        "key_products",
        "layer_ops",
        "quantized_decode",
        "retrieval_attention",
        "row_queries",
        "selection",
        "unit_scores",
        "unit_select",
    ):
        module = import_module(f"kvkeep.kernels.triton.{name}")
        started = set(re.findall(r"^ +(_\w+)\[", Path(module.__file__).read_text(), re.MULTILINE))
        assert started and all(isinstance(getattr(module, kernel), FastLauncher) for kernel in started), name


def test_nothing_changes_under_the_interpreter():
    """There a kernel is a plain function, and results are torch's."""
    code = """if True:
        import torch
        from kvkeep.kernels.torch import elementwise
        from kvkeep.kernels.triton import layer_ops
        from kvkeep.kernels.triton.common import FastLauncher
        assert not isinstance(layer_ops._apply_angles, FastLauncher)
        for n in (1, 9, 16, 9):
            vectors, angle = torch.randn(2, n, 8), torch.randn(n, 4)
            given = vectors, angle.cos(), angle.sin(), False, torch.float32
            assert (layer_ops.apply_angles(*given) - elementwise.apply_angles(*given)).abs().max() < 1e-5
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
