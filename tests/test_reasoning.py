"""Long answers: memory stays flat while 2,000 tokens are decoded; files of problems are checked."""

import json

import pytest
import torch
from conftest import EVICTING, make_llama

import kvkeep
from kvkeep.errors import BadInput
from kvkeep.evaluate.tasks.math import aime, math500

BUFFER = 64


@pytest.mark.parametrize("spec", [name for name in EVICTING if name != "full"])
def test_two_thousand_tokens_in_flat_memory(spec):
    model, budget = make_llama(num_hidden_layers=2, max_position_embeddings=4096), 48
    own = kvkeep.methods[spec].schedule.every
    cache = kvkeep.Cache(model, spec, budget, schedule=None if own else BUFFER)
    sizes, allowed = [], budget + (0 if own else BUFFER - 1)
    with torch.inference_mode():
        token = model(torch.arange(100)[None] % 128, past_key_values=cache).logits[:, -1:].argmax(-1)
        for step in range(2000):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            report = cache.report()
            assert report.kept_per_head <= allowed, step
            sizes.append(report.bytes + report.index_bytes)
    assert max(sizes[500:]) <= max(sizes[:500]) + moved(cache, sizes) and cache.get_seq_length() == 2100


def moved(cache, sizes):
    """Bytes that come and go where heads share a budget: a segment has a 64th of room, rounded down, so what the same
    tokens take depends on how they are shared out, by less than a slot for each segment."""
    if not cache.method.heads.needs_scores:
        return 0
    rooms = [layer.room for layer in cache.backend.store.values()]
    return sum(len(room) - 1 for room in rooms) * sizes[-1] / sum(map(sum, rooms))


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_both_formats_are_read(tmp_path):
    worked = {"question": "q", "answer": "Half is $\\boxed{\\frac{1}{2}}$. The answer is: \\frac{1}{2}"}
    official = {"problem": "p", "solution": "long", "answer": "p - q", "unique_id": "test/1.json"}
    first, second = math500(write(tmp_path / "math.jsonl", worked, "", official))
    assert (first.references, first.id) == (("\\frac{1}{2}",), "0")
    assert (second.references, second.id, second.question) == (("p - q",), "test/1.json", "p")
    (one,) = aime(write(tmp_path / "aime.jsonl", {"id": 60, "problem": "p", "answer": "033"}))
    assert one.references == ("033",) and one.metric == "aime"


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        ({"problem": "p"}, "line 2 has no answer"),
        ({"answer": "3"}, "line 2 has no problem or question"),
        ({"id": "a", "problem": "p", "answer": "3"}, "line 2 has the id 'a' of aime.jsonl, line 1"),
        ({"problem": "p", "answer": "x"}, "line 2: the answer 'x' is not a whole number"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    good = {"id": "a", "problem": "p", "answer": "3"}
    with pytest.raises(BadInput, match=message):
        aime(write(tmp_path / "aime.jsonl", good, line))


def test_no_file_and_an_empty_one(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        math500(tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match="has no problems"):
        math500(write(tmp_path / "empty.jsonl", ""))
