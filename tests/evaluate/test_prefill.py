"""Methods that prefill as the model does share a prefill, and others do not."""

import pytest
import tiny_chat
import torch
from conftest import RETRIEVING

from kvkeep.compress.parse import parse
from kvkeep.evaluate.prefill import prefill

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 17 == 0 else "") for i in range(260))
BUDGETS = (70, 120, 200)


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


def same(one, other):
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_methods_that_read_as_the_model_does_share_a_reading_and_others_do_not(chat):
    ids = chat[1](TEXT, return_tensors="pt").input_ids[0]
    cells = [(spec, budget) for spec in RETRIEVING for budget in BUDGETS] + [("full", None), ("snapkv", 70)]
    methods = {cell: parse(cell[0]) for cell in cells}
    shared, alone = (prefill(*chat, ids, methods, (), share) for share in (True, False))
    together = [one for one in shared if not (retrieval := one.method.retrieval) or retrieval.window is None]
    for one, other in zip(shared, alone, strict=True):
        assert one.config == other.config and one.report == other.report
        same(one.logits, other.logits)
        assert one.prefill_configs == (len(together) if one in together else 1) and other.prefill_configs == 1
    assert [one.is_frozen for one in shared] == [not one.method.retrieval for one in shared]
