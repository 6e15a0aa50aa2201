"""Files of math problems are read and checked."""

import json

import pytest

from kvkeep.errors import BadInput
from kvkeep.evaluate.tasks.math import aime, math500


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_both_formats_are_read(tmp_path):
    worked = {"question": "q", "answer": "Half is $\\boxed{\\frac{1}{2}}$. The answer is: \\frac{1}{2}"}
    official = {"problem": "p", "solution": "long", "answer": "p - q", "unique_id": "test/1.json"}
    first, second = math500(write(tmp_path / "math.jsonl", worked, "", official))
    assert (first.references, first.id) == (("\\frac{1}{2}",), "0")
    assert (second.references, second.id) == (("p - q",), "test/1.json")
    assert second.question.startswith("p\n\nReason") and second.long
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
