"""What cannot be captured with fused operations is captured without, and what cannot be captured runs."""

from types import SimpleNamespace

import pytest
import torch
from families import build

from kvkeep.model import fused
from kvkeep.model.cuda_graph import CudaGraphRunner


@torch.no_grad()
def test_what_cannot_be_fused_is_captured_without_and_what_cannot_be_captured_runs(monkeypatch):
    model, tries = build("llama", "eager"), []

    def capture(self):
        tries.append(any("forward" in vars(part) for part in model.modules()))
        if tries[-1] or fails:
            raise RuntimeError("no compiler\nat all")
        self.graph, self.result = SimpleNamespace(replay=lambda: None), "replayed"

    monkeypatch.setattr(CudaGraphRunner, "_capture", capture)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr("kvkeep.model.cuda_graph.single_device", lambda model: model.device)
    assert fused.is_faster(model)
    fails = False
    with pytest.warns(UserWarning, match="with fused operations .no compiler.; it runs without"):
        assert CudaGraphRunner(lambda: "run", model)() == "replayed"
    assert tries == [True, False]
    fails = True
    with pytest.warns(UserWarning) as told:
        assert CudaGraphRunner(lambda: "run", model)() == "run"
    assert len(told) == 2 and "in a CUDA graph (no compiler); it runs without" in str(told[1].message)
