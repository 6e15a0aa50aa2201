"""A kernel is used where it works and where its tensors are; torch does the rest."""

import warnings
from importlib import import_module
from inspect import signature

import pytest
import torch


class OnGpu(torch.Tensor):
    device = torch.device("cuda")


def test_a_failing_kernel_is_reported_once_and_done_without():
    from kvkeep.kernels.dispatch import KernelDispatch

    best = KernelDispatch("column_mass", "nothing_of_this_name", lambda *_: "torch")
    queries = torch.randn(2, 3, 4).as_subclass(OnGpu)
    rest = (torch.randn(1, 3, 4), torch.arange(3)[None], 3, 0.5)
    with pytest.warns(UserWarning, match="'column_mass' cannot be used .No module named .*; torch does its work"):
        assert best(queries, *rest) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert best(queries, *rest) == "torch"


def test_a_kernel_starts_where_its_tensors_are(monkeypatch):
    """A model spread over several GPUs: the current device is not the one its later layers are on."""
    from kvkeep.kernels.dispatch import KernelDispatch

    class There(torch.Tensor):
        device = torch.device("cuda:1")

    now = [0]

    class On:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            now.append(self.index)

        def __exit__(self, *_):
            now.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", On)
    best = KernelDispatch("column_mass", "mass", lambda *_: "torch")
    best.kernel.function = lambda *_: now[-1]
    assert best(torch.randn(2).as_subclass(There)) == 1 and now == [0]
    now[0] = 1
    monkeypatch.setattr(torch.cuda, "device", None)  # nothing to do
    assert best(torch.randn(2).as_subclass(There)) == 1


@pytest.mark.parametrize(
    "size, dim, kind, fits",
    [
        (256, 128, torch.bfloat16, True),
        (3, 80, torch.float32, True),
        (257, 128, torch.bfloat16, True),
        (513, 16, torch.bfloat16, False),
        (257, 256, torch.bfloat16, False),
        (256, 256, torch.float32, False),
    ],
)
def test_chunks_of_keys_that_fit_into_shared_memory_have_a_kernel(size, dim, kind, fits):
    from kvkeep.kernels.dispatch import chunk_mass

    queries, keys = (torch.zeros(1, size, dim, dtype=kind).as_subclass(OnGpu) for _ in range(2))
    assert chunk_mass.uses_kernel(queries, keys, size) is fits
    assert not chunk_mass.uses_kernel(queries, keys.to(torch.float16), size)
    assert not chunk_mass.uses_kernel(queries.mT.contiguous().mT, keys, size)
    assert not chunk_mass.uses_kernel(queries.as_subclass(torch.Tensor), keys, size)


def test_rotations_that_have_a_kernel():
    from kvkeep.kernels.dispatch import apply_angles

    def is_used(*shape, angles=(5, 8), kind=torch.bfloat16, dtype=torch.float32, change=lambda vectors: vectors):
        vectors, angles = change(torch.zeros(shape, dtype=kind)), torch.zeros(angles)
        both = angles.as_subclass(OnGpu), angles.as_subclass(OnGpu)
        return apply_angles.uses_kernel(vectors.as_subclass(OnGpu), *both, False, dtype)

    assert is_used(3, 5, 16) and is_used(3, 5, 20) and is_used(3, 5, 16, angles=(3, 5, 8))
    assert is_used(3, 5, 16, kind=torch.float32) and is_used(3, 5, 16, dtype=torch.bfloat16)
    assert not is_used(5, 16) and not is_used(1, 3, 5, 16) and not is_used(3, 0, 16, angles=(0, 8))
    assert not is_used(3, 5, 16, angles=(1, 8)) and not is_used(3, 5, 16, angles=(1, 5, 8))
    assert not is_used(3, 5, 16, dtype=torch.float16) and not is_used(3, 5, 16, kind=torch.float64)
    assert not is_used(3, 5, 16, change=lambda vectors: vectors.mT.contiguous().mT)
    assert not is_used(3, 5, 16, change=lambda vectors: vectors.requires_grad_())
    assert not apply_angles.uses_kernel(torch.zeros(3, 5, 16), *[torch.zeros(5, 8)] * 2, False, torch.float32)


@pytest.mark.parametrize(
    "dim, kind, fits", [(128, torch.bfloat16, True), (129, torch.bfloat16, False), (64, torch.float16, False)]
)
def test_quadratic_forms_that_have_a_kernel(dim, kind, fits):
    from kvkeep.kernels.dispatch import quadratic_form

    keys = torch.zeros(1, 3, dim, dtype=kind)
    assert quadratic_form.uses_kernel(keys.as_subclass(OnGpu)) is fits
    assert not quadratic_form.uses_kernel(keys)
    assert not quadratic_form.uses_kernel(keys.mT.contiguous().mT.as_subclass(OnGpu))


def test_long_texts_that_are_attended_to_in_two_passes(monkeypatch):
    from kvkeep.kernels import dispatch
    from kvkeep.kernels.torch import reference

    def is_used(q=8, n=32, dim=16, kind=torch.bfloat16, own=None, backend="cudnn", like=OnGpu):
        monkeypatch.setattr(reference, "sdpa_backend", lambda *_: backend)
        shapes = ((4, q, kind), (2, n, kind), (2, n, kind), (2, q, own or kind), (2, q, own or kind))
        parts = [torch.zeros(1, heads, m, dim, dtype=of).as_subclass(like) for heads, m, of in shapes]
        return dispatch.appended_attention.uses_kernel(*parts, 0.3)

    monkeypatch.setattr(dispatch, "TWO_PASSES", 256)
    assert is_used() and not is_used(n=31) and not is_used(q=7)
    assert not is_used(dim=20) and not is_used(own=torch.float32) and not is_used(backend=None)
    assert not is_used(like=torch.Tensor)
    monkeypatch.undo()
    assert reference.sdpa_backend(*(torch.zeros(1, 2, 4, 8) for _ in range(3)), 0.3) is None  # float32


def test_a_kernel_takes_what_its_reference_takes():
    """Types stand in the reference alone; a kernel may know more arguments, or fewer that have a default."""
    pytest.importorskip("triton")
    from kvkeep.kernels import dispatch

    found = [each for each in vars(dispatch).values() if isinstance(each, dispatch.KernelDispatch)]
    assert len(found) > 30
    for each in found:
        module = import_module(f"kvkeep.kernels.triton.{each.kernel.module}")
        own, known = (list(signature(f).parameters.values()) for f in (getattr(module, each.name), each.reference))
        assert all(mine.name == theirs.name for mine, theirs in zip(own, known, strict=False)), each.name
        assert all(extra.default is not extra.empty for extra in [*own[len(known) :], *known[len(own) :]]), each.name
