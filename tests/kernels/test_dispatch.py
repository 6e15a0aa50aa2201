"""A kernel is used where it works and where its tensors are; torch does the rest."""

import warnings

import pytest
import torch


def test_a_failing_kernel_is_reported_once_and_done_without(monkeypatch):
    from kvkeep.kernels.dispatch import KernelDispatch

    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    best = KernelDispatch("column_mass", "nothing_of_this_name")
    queries = torch.randn(2, 3, 4).as_subclass(OnGpu)
    rest = (torch.randn(1, 3, 4), torch.arange(3)[None], 3, 0.5)
    monkeypatch.setattr(best, "reference", lambda *_: "torch")
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
    best = KernelDispatch("column_mass", "mass")
    best.kernel = lambda *_: now[-1]
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

    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    queries, keys = (torch.zeros(1, size, dim, dtype=kind).as_subclass(OnGpu) for _ in range(2))
    assert chunk_mass.uses_kernel(queries, keys, size) is fits
    assert not chunk_mass.uses_kernel(queries, keys.to(torch.float16), size)
    assert not chunk_mass.uses_kernel(queries.mT.contiguous().mT, keys, size)
    assert not chunk_mass.uses_kernel(queries.as_subclass(torch.Tensor), keys, size)
