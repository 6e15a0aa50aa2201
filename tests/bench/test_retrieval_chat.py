"""The script that says which layers attend to a fact, where the outcome is known beforehand."""

import importlib
import random
import sys
from pathlib import Path

import pytest
import tiny_chat
import torch

from kvkeep.model.chat import encode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("retrieval_chat")
    sys.modules.pop("retrieval_chat", None)


@pytest.fixture
def drawn(script):
    model, tokenizer = tiny_chat.sharp()
    return script.Runner(model, tokenizer), *script.draw(tokenizer, 300, None, random.Random(3))


def test_the_places_of_a_number_are_its_digits(script, drawn):
    runner, text, numbers = drawn
    number = next(iter(numbers.values()))
    ids = encode(runner.tokenizer, [{"role": "user", "content": text}])[0]
    found = sorted(script.places(runner.tokenizer, ids, number))
    assert found == list(range(found[0], found[-1] + 1))
    assert runner.tokenizer.decode(ids[found]).strip() == number


@pytest.mark.parametrize(("method", "share", "known"), [("full", 0.25, 1.0), ("streamingllm", 0.1, 0.0)])
def test_all_layers_attend_to_what_is_kept_and_none_to_what_is_evicted(script, drawn, method, share, known):
    runner, text, numbers = drawn
    row = next(runner.chat(method, share, text, numbers))
    assert (row["window"], row["decode"]) == (known, known)


def test_the_logprob_of_a_number_is_that_of_its_tokens(script, drawn):
    runner, text, numbers = drawn
    question, number = next(iter(numbers.items()))
    row = next(runner.chat("full", 0.25, text, numbers))
    ids = encode(runner.tokenizer, [{"role": "user", "content": f"{text}\n\n{question}"}])[0].tolist()
    said = runner.tokenizer(script.LEAD + number, add_special_tokens=False).input_ids
    with torch.inference_mode():
        logits = runner.model(torch.tensor([ids + said])).logits[0, :-1].log_softmax(-1)
    known = logits[-len(number) :].gather(1, torch.tensor(said[-len(number) :])[:, None]).sum()
    assert row["logprob"] == pytest.approx(float(known), abs=1e-3)


def test_a_fact_is_attended_to_where_its_chunk_was_retrieved(script, drawn):
    runner, text, numbers = drawn
    row = next(runner.chat("actqkv", 0.25, text, numbers))
    assert 0 < row["decode"] < 1
    heads = [set(head) for state in runner.states.values() for head in state.positions()]
    last = max(heads[0])
    everywhere, nowhere = set.intersection(*heads), set(range(last)) - set.union(*heads)
    assert runner.attended(None, everywhere) == 1
    assert runner.attended(None, nowhere) == 0
    one = heads[0] - heads[-1]  # each layer retrieves for itself
    assert runner.attended(None, one) == sum(one <= head for head in heads) / len(heads) == 0.5
