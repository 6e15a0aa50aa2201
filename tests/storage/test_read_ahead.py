"""Layers that are copied ahead are those that are read, whatever order that is."""

import random

import pytest
import torch
from late_copies import LateCopies

from kvkeep.storage.read_ahead import Read, ReadAhead

LAYERS = [0, 1, 3, 4, 7]


class Reader:
    """Reads numbers: a layer's bytes of a text."""

    def __init__(self):
        self.ahead = ReadAhead(torch.device("cpu"), self.shape, lambda read, to: to.copy_(self.bytes(read)))
        self.late = LateCopies(self.ahead)

    def shape(self, read):
        return len(read.what), 2 + read.index

    def bytes(self, read):
        made = torch.Generator().manual_seed(1000 * read.index + sum(map(ord, read.what)))
        return torch.randint(256, self.shape(read), generator=made, dtype=torch.uint8)

    def check(self, index, text):
        read = Read(index, text, text)
        payload = self.ahead.read(read, LAYERS)
        assert torch.equal(payload, self.bytes(read))
        assert torch.equal(payload, self.bytes(read))  # also while the next is copied
        self.ahead.done()


@pytest.mark.parametrize("texts", [["one"], ["one", "two"], ["a", "longer", "than", "these"]])
def test_all_but_the_first_layers_are_copied_ahead(texts):
    """The first layer says what is read of each; of the second, the first text is read before its order is known."""
    one = Reader()
    for _ in range(3):  # passes
        for index in LAYERS:
            for text in texts:
                one.check(index, text)
        assert not (one.ahead.order or one.ahead.before or one.ahead.ahead)
        assert len(one.ahead.now) == len(one.ahead.next) == 0  # nothing is held after the last layer
    assert (one.late.num_ahead, one.late.num_now) == (3 * (4 * len(texts) - 1), 3 * (len(texts) + 1))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_read_is_right(seed):
    """Layers left out or read again, other texts in every layer, passes that are cut short."""
    source, one = random.Random(seed), Reader()
    for _ in range(12):
        texts = source.sample(["a", "bc", "def", "ghij", "klmnop"], source.randint(1, 4))
        for index in LAYERS[: source.randint(1, 5)]:
            for text in texts if source.random() < 0.8 else source.sample(texts, len(texts)):
                if source.random() < 0.9:
                    one.check(index, text)
        if source.random() < 0.5:
            one.ahead.end()
            assert not (one.ahead.order or one.ahead.before or one.ahead.ahead or len(one.ahead.now))


def test_a_thread_that_reads_beside_a_pass_may_be_in_another_mode():
    """Such as one that saves a text while answers are decoded."""
    one = Reader()
    for index in LAYERS[:3]:
        with torch.inference_mode():
            one.check(index, "text")
    assert one.ahead.ahead
    for index in LAYERS:
        one.check(index, "saved")
        with torch.inference_mode():
            one.check(index, "text")
