"""What a method finds in a chat, and whether it attends to the fact that is asked for:

    python benchmarks/retrieval_chat.py --methods actqkv actqkv:question_weight=4+told tokenselect --haystack DIR

The first message is a text with four facts and a question about one; the next messages ask for others. An answer is
right if it has the fact's number. `window` and `decode` are the shares of layers and KV heads that attend to all tokens
of that number: of the question's last window (a method that evicts: after it), and of the answer's tokens on average.
`logprob` is that of the number after "The number is", of all its tokens together: it tells methods apart where the
answers of a small model do not.
DIR holds prose (*.txt); without it, one line of noise is repeated. `+told` after a method's name gives it the
question's queries before every turn, as `Engine.generate(text, question=…)` does and `Engine.chat` does not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, islice, product
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch

from kvkeep.cache.retrieval import LayerRetriever
from kvkeep.compress.parse import parse
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.evaluate.tasks.ruler.niah import NOISE, Essays
from kvkeep.model.chat import encode, eos_token_ids
from kvkeep.model.load import load, quiet_transformers
from kvkeep.storage.offload.layer_state import LayerState

FACTS = (  # what stands in the text, what is asked
    ("The serial number of the lamp motor is {}.", "What is the serial number of the lamp motor?"),
    ("The telephone number of the harbour master is {}.", "What is the telephone number of the harbour master?"),
    ("The museum bought its violin for {} dollars.", "For how many dollars did the museum buy its violin?"),
    ("In its best year the orchard grew {} apples.", "How many apples did the orchard grow in its best year?"),
)
ANSWER = 24  # tokens at most
LEAD = "The number is "
TOLD = "+told"


def draw(tokenizer: Any, tokens: int, haystack: Path | None, rng: random.Random) -> tuple[str, dict[str, str]]:
    """A text, and what may be asked about it: question -> number."""
    sentences = Essays(haystack).sentences(2 * tokens) if haystack else [NOISE] * tokens
    first, length, lines = rng.randrange(len(sentences) // 2), 0, list[str]()
    while length < tokens:
        lines.append(sentences[(first + len(lines)) % len(sentences)])
        length += len(tokenizer(lines[-1]).input_ids)
    numbers = {}
    for fact, question in rng.sample(FACTS, len(FACTS)):
        numbers[question] = str(rng.randint(10**6, 10**7 - 1))
        lines.insert(rng.randrange(len(lines)), fact.format(numbers[question]))
    return " ".join(lines), numbers


def places(tokenizer: Any, ids: torch.Tensor, number: str) -> set[int]:
    """Positions of the number's tokens where it stands first."""
    pieces = [tokenizer.decode([token]) for token in ids.tolist()]
    ends, start = [*accumulate(map(len, pieces))], "".join(pieces).index(number)
    return {i for i, end in enumerate(ends) if start < end < start + len(number) + len(pieces[i])}


class Runner:
    """Chats with one model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ends = eos_token_ids(model, tokenizer)
        self.states: dict[int, LayerState] = {}  # layer -> with what it retrieved last

    def chat(self, name: str, share: float, text: str, numbers: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Ask for these numbers in turn. -> a row for every turn"""
        method, messages = parse(name.removesuffix(TOLD)), list[dict[str, str]]()
        sequence: Sequence | None = None
        for turn, (question, number) in enumerate(numbers.items(), 1):
            messages.append({"role": "user", "content": f"{text}\n\n{question}" if turn == 1 else question})
            ids = encode(self.tokenizer, messages)[0]
            if sequence is None:
                budget = None if name == "full" else int(share * len(ids))
                sequence = SequenceConfig(self.model, self.tokenizer, method, budget).new_sequence()
            if ids[: len(sequence.token_ids)].tolist() != sequence.token_ids:
                return  # the answer's text has other ids than were decoded: a chat would begin anew
            if name.endswith(TOLD):
                sequence.set_question(question, len(ids))
            answer, found = self.answer(sequence, ids, number)
            messages.append({"role": "assistant", "content": answer})
            asked = {"turn": turn, "asked": "later" if turn > 1 else "beside the text"}
            yield {**asked, "right": number in answer, **found, "answer": answer}

    def answer(self, sequence: Sequence, ids: torch.Tensor, number: str) -> tuple[str, dict[str, float]]:
        """Decode greedily. -> text, how likely the number was, and what shares of layers and heads attended to it"""
        retrieve, wanted = LayerRetriever._retrieve, places(self.tokenizer, ids, number)
        self.states.clear()

        def note(layer: LayerRetriever, *given: Any) -> LayerState:
            self.states[layer.index] = state = retrieve(layer, *given)
            return state

        with patch.object(LayerRetriever, "_retrieve", note):
            logits, answer = sequence.prefill(ids), list[int]()
            shares, states = [self.attended(sequence, wanted)], dict(self.states)
            logprob = self.logprob(sequence.fork(), logits, number)
            self.states = states
            while (token := int(logits.argmax())) not in self.ends and len(answer) < ANSWER:
                answer.append(token)
                logits = sequence.forward(torch.tensor([token]))[-1]
                shares.append(self.attended(sequence, wanted))
        found = {"logprob": logprob, "window": shares[0], "decode": mean(shares[1:] or shares)}
        return self.tokenizer.decode(answer), found

    def logprob(self, sequence: Sequence, logits: torch.Tensor, number: str) -> float:
        """Of a number, said after a few words instead of the model's own answer."""
        lead, said = (self.tokenizer(text, add_special_tokens=False).input_ids for text in (LEAD, LEAD + number))
        found = []
        for token in said:
            found.append(float(logits.float().log_softmax(-1)[token]))
            logits = sequence.forward(torch.tensor([token]))[-1]
        return sum(found[len(lead) :])

    def attended(self, sequence: Sequence, wanted: set[int]) -> float:
        layers = [state.positions() for state in self.states.values()]
        if not layers and sequence.config.method.retrieval:
            return 1.0  # nothing is offloaded yet, or the method prefills with full attention
        if not layers:
            kept = (sequence.cache.backend.positions(i)[0] for i in range(self.model.config.num_hidden_layers))
            layers = [[head.tolist() for head in heads] for heads in kept]
        return mean(float(wanted.issubset(head)) for heads in layers for head in heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["actqkv", "infllm", "qllm+told", "tokenselect"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25], help="of the first prompt: budgets")
    for name, default in {"samples": 4, "tokens": 3500, "turns": 3, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--haystack", type=Path)
    parser.add_argument("--out", type=argparse.FileType("a"), default=sys.stdout, help="JSONL; rows are appended")
    for name in ("model", "device", "dtype"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    quiet_transformers()
    runner, cells = Runner(*load(options.model, device=options.device, dtype=options.dtype)), defaultdict(list)
    for sample in range(options.seed, options.seed + options.samples):
        text, numbers = draw(runner.tokenizer, options.tokens, options.haystack, random.Random(sample))
        for share, name in product(options.shares, options.methods):
            for found in islice(runner.chat(name, share, text, numbers), options.turns):
                cells[name, share, found["asked"]].append(found)
                row = json.dumps({"method": name, "share": share, "sample": sample, **found})
                print(row, file=options.out, flush=True)
    shown = "right", "logprob", "window", "decode"
    print(f"\n| method | share | asked | n | {' | '.join(shown)} |\n|---|---|---|---|---|---|---|---|")
    for (name, share, when), rows in cells.items():
        means = " | ".join(f"{mean(float(row[key]) for row in rows):.2f}" for key in shown)
        print(f"| {name} | {share:g} | {when} | {len(rows)} | {means} |")


if __name__ == "__main__":
    main()
