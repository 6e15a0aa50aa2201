"""What is measured is what happened."""

import json

import pytest
from typer.testing import CliRunner

from kvkeep.cli.app import app
from kvkeep.errors import BadParameter
from kvkeep.evaluate.cost import Plan, costs
from kvkeep.model.shapes import SHAPES, of_shape


def test_costs_of_every_cell_beside_the_uncompressed_model():
    model = of_shape("tiny")
    plan = Plan(("kvkeep", "snapkv", "full"), (32, 0.5), (100, 200), (1, 3), steps=2)
    found = list(costs(model, plan))
    assert len(found) == 2 * 2 * (1 + 3 * 2)
    for cost in found:
        plain = next(c for c in found if c.by == "transformers" and (c.context, c.batch) == (cost.context, cost.batch))
        assert cost.step_ratio == pytest.approx(cost.step_s / plain.step_s)
        assert cost.prefill_ratio == pytest.approx(cost.prefill_s / plain.prefill_s)
        assert cost.tokens_per_s == pytest.approx(cost.batch / cost.step_s) and cost.step_s > 0
        token = 2 * 2 * 2 * 16 * 4  # layers, key heads, key and value, numbers, bytes
        kept = {"full": cost.context}.get(cost.method, 32 if cost.budget == 32 else cost.context // 2)
        assert cost.kv_bytes == pytest.approx(kept * token, rel=0.02)


def test_a_random_model_of_a_shape_is_a_model():
    import torch

    model = of_shape("tiny")
    logits = model(torch.arange(20)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0 and "llama-8b" in SHAPES


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"methods": ("infllm",)}, "'infllm' fetches"),
        ({"budgets": (0,)}, "budget=0"),
        ({"contexts": (1,)}, "at least 2 tokens"),
        ({"batches": (0,)}, "1 sequence"),
    ],
)
def test_plans_that_make_no_sense(plan, says):
    with pytest.raises(BadParameter, match=says):
        Plan(**{"methods": ("snapkv",), "budgets": (64,), "contexts": (128,), **plan})


def test_the_command(tmp_path):
    args = ["bench", "--shape", "tiny", "--lengths", "100", "--budgets", "32", "--batch", "1,2", "--steps", "2"]
    done = CliRunner().invoke(app, [*args, "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert all(word in done.stdout for word in ("kvkeep", "full", "tok/s", "read s"))
    assert len(json.loads((tmp_path / "costs.json").read_text())) == 4
    wrong = CliRunner().invoke(app, ["bench", "--shape", "llama-9b"])
    assert wrong.exit_code == 2 and "llama-8b" in wrong.stderr
