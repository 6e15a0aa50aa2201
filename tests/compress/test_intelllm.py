"""IntelLLM's scorer against plain masks."""

import pytest
import torch

from kvkeep.compress.scorers.intelllm import IntelLLMScorer
from kvkeep.types import PAD_POSITION, Observation


@pytest.mark.parametrize("mode", ["global", "local"])
@pytest.mark.parametrize("lengths, near", [((64, 40), None), ((64, 20), None), ((64, 64), 7), ((64, 40), 0)])
def test_gravity_is_hidden_at_the_end_of_each_head(lengths, near, mode):
    torch.manual_seed(0)
    keys, queries, seq_len, head, budget = torch.randn(2, 64, 8), torch.randn(2, 16, 8) * 3, 80, 6, 48
    positions = torch.full((2, 64), PAD_POSITION)
    for i, n in enumerate(lengths):
        positions[i, :n] = torch.arange(seq_len - n, seq_len)
    seen = Observation(queries, keys, keys, positions, lengths, seq_len, 16, 8**-0.5)
    got = IntelLLMScorer(16, head, near, mode)(seen, budget)
    near = budget // 2 if near is None else near
    for i, n in enumerate(lengths):
        index = torch.arange(64)
        first, last = index < head, index >= n - near
        late = positions[i] > torch.arange(seq_len - 16, seq_len)[:, None]
        logits = (queries[i] @ keys[i].T) * 8**-0.5
        chances = logits.masked_fill(late | (last if mode == "global" else first), float("-inf")).softmax(-1)
        want = chances.nan_to_num(0).masked_fill(first | last, 0.0).sum(0)
        torch.testing.assert_close(got[i], want, atol=1e-5, rtol=0)
