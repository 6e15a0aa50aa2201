"""A cache on a GPU takes other ways than on a CPU: with interpreted kernels, it takes them here, too."""

import pytest
import tiny_chat
import torch
from decode_cases import DEVICE

import kvkeep
from kvkeep.kernels.dispatch import KernelDispatch

IDS = torch.randint(5, 120, (2, 70), generator=torch.Generator().manual_seed(0))
SPECS = "full", "snapkv+adakv", "h2o", "rkv", "streamingllm"
CASES = [(spec, None) for spec in SPECS] + [("snapkv", "int8")]
DECODING = "append_ragged", "ragged_attention", "extend_attention", "append_quantized", "quantized_attention"


def two_turns(model, spec, storage):
    """A left-padded batch decodes; a fork of its cache goes on. -> all ids, and the positions that the first keeps"""
    cache = kvkeep.Cache(model, spec, None if spec == "full" else 40, storage=storage)
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    first = model.generate(IDS.to(DEVICE), attention_mask=mask.to(DEVICE), past_key_values=cache, **how)
    more = torch.cat([first.cpu(), torch.full((2, 5), 7)], 1)
    mask = torch.cat([mask, torch.ones(2, more.shape[1] - IDS.shape[1], dtype=mask.dtype)], 1)
    second = model.generate(more.to(DEVICE), attention_mask=mask.to(DEVICE), past_key_values=cache.fork(), **how)
    return second.tolist(), cache.kept(0)


@pytest.mark.parametrize(("spec", "storage"), CASES)
def test_a_cache_decodes_with_kernels_what_it_decodes_without(spec, storage, monkeypatch):
    model, own, used = tiny_chat.model().to(DEVICE), KernelDispatch.uses_kernel, set()

    def uses_kernel(self, first, *rest):
        on_gpu = own(self, first, *rest)
        uses = on_gpu or (DEVICE == "cpu" and self.name in DECODING and self.supports(first, *rest))
        used.update([self.name] if uses else [])
        return uses

    monkeypatch.setattr(KernelDispatch, "uses_kernel", uses_kernel)
    with_kernels = two_turns(model, spec, storage)
    monkeypatch.setattr(KernelDispatch, "uses_kernel", lambda *_: False)
    assert two_turns(model, spec, storage) == with_kernels
    assert used & set(DECODING)
