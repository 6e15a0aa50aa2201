"""How much is prefilled between two decode steps is learned until the steps come as often as asked."""

import pytest

from kvkeep.engine import pace
from kvkeep.engine.pace import Pace


class Device:
    """Time passes with the tokens that are prefilled, and with every decode step."""

    def __init__(self, monkeypatch, tokens_per_second, step_s):
        self.now, self.speed, self.step_s = 100.0, tokens_per_second, step_s
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)

    def run(self, speed, cost, layers=32):
        """One pass, with the decode steps that the pace asks for. -> seconds between two of them"""
        speed.begin_pass(cost)
        every = speed.layers_between(layers)
        speed.steps = 1 + len([i for i in range(layers - 1) if i % every == every - 1])
        seconds = cost / self.speed + speed.steps * self.step_s
        self.now += seconds
        return seconds / speed.steps


@pytest.mark.parametrize("tokens_per_second", [3_000, 35_000, 90_000])
@pytest.mark.parametrize("target", [0.05, 0.2])
def test_the_time_between_two_steps_comes_near_the_target(tokens_per_second, target, monkeypatch):
    device, speed = Device(monkeypatch, tokens_per_second, 0.008), Pace.of("cuda", target)
    cost = 4 * target * tokens_per_second  # of a pass: a few steps fit into it
    gaps = [device.run(speed, cost) for _ in range(40)]
    assert gaps[-1] == pytest.approx(target, rel=0.25)


def test_short_passes_say_nothing_about_long_ones(monkeypatch):
    """A pass of a few tokens takes its launches' time."""
    device, speed = Device(monkeypatch, 1000, 0.0), Pace.of("cuda", 0.5)
    for _ in range(20):
        device.run(speed, 100)
    assert speed.tokens == pace.STEP_TOKENS["cuda"]


def test_time_in_which_nothing_was_prefilled_is_not_counted(monkeypatch):
    device, speed = Device(monkeypatch, 35_000, 0.008), Pace.of("cuda", None)
    device.run(speed, 8000)
    speed.pause()
    device.now += 1000.0
    before = speed.tokens
    device.run(speed, 8000)
    assert speed.tokens == before


def test_on_a_cpu_nothing_is_learned_unless_it_is_asked_for(monkeypatch):
    for target, least, most in ((None, 256, 256), (0.5, 30, 60)):
        device, speed = Device(monkeypatch, 100, 0.1), Pace.of("cpu", target)
        for _ in range(30):
            device.run(speed, speed.tokens, layers=1)
        assert least <= speed.tokens <= most
