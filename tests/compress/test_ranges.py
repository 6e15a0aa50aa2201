"""Every numeric parameter of every method and modifier has a range, and what is beyond it is refused by name."""

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated

import pytest

import kvkeep
from kvkeep.arguments import LARGEST, Checked, Range
from kvkeep.compress.catalogue import METHODS
from kvkeep.compress.parse import parse
from kvkeep.compress.presets import MODIFIERS
from kvkeep.errors import BadParameter

TINY = 5e-324  # the least float above 0
COUNT, POSITIVE, SHARE = (0, LARGEST), (1, LARGEST), (0.0, 1.0)
AMOUNT, ABOVE_ZERO, COSINE = (0.0, float(LARGEST)), (TINY, float(LARGEST)), (-1.0, 1.0)
RANGES = {
    **dict.fromkeys(["first", "gap", "head_gravity", "near", "recent", "sinks"], COUNT),
    **dict.fromkeys(
        ["anchors", "beta", "block", "buffer", "chunk", "chunks", "future", "hold", "iterations", "kappa", "local"],
        POSITIVE,
    ),
    **dict.fromkeys(
        ["longest", "pack", "page", "representatives", "reuse", "sketch", "smooth", "tokens", "window"], POSITIVE
    ),
    **dict.fromkeys(["alpha", "floor", "importance", "random", "share"], SHARE),
    **dict.fromkeys(["epsilon", "gamma", "offset", "question_weight", "tau", "threshold", "weight"], AMOUNT),
    **dict.fromkeys(["power", "ridge", "tau1", "tau2"], ABOVE_ZERO),
    **dict.fromkeys(["alike", "similar"], COSINE),
    **dict.fromkeys(["pool", "value_pool"], POSITIVE),  # and odd
    "bits": (1, 16),
    "buckets": (1, 4),  # of the default bits
    "contiguity": (0.0, math.nextafter(1, 0)),
    "coverage": (TINY, 1.0),
    "lag": (2, LARGEST),
    "norm": (0, 2),
    "seed": (0, 2**63 - 1),
    # the same name for another thing
    "ahakv:recent": POSITIVE,
    "intelllm:gap": POSITIVE,
    "emllm:gamma": (-math.inf, math.inf),
    "protokv:gamma": ABOVE_ZERO,
    "+prototypes:gamma": ABOVE_ZERO,
    "+threshold:tau": (-math.inf, math.inf),
    "satkv:window": COUNT,
}
BUILT_IN = [
    *((name, name, part) for name, part in METHODS.items()),
    *((f"{'protokv' if name == 'recall' else 'snapkv'}+{name}", f"+{name}", part) for name, part in MODIFIERS.items()),
]
NUMBERS = [
    (spec, part, key, default)
    for spec, part, preset in BUILT_IN
    for key, default in preset.defaults.items()
    if not isinstance(default, str | bool)
]


@pytest.mark.parametrize(("spec", "part", "key", "default"), NUMBERS, ids=lambda each: str(each))
def test_what_is_out_of_range_is_refused_by_name(spec, part, key, default):
    least, most = RANGES.get(f"{part}:{key}") or RANGES[key]
    wrong = [math.nan, math.inf, -math.inf, "x", True, [1]]
    if least > -math.inf:
        wrong += [least - 1] if isinstance(least, int) else [math.nextafter(least, -math.inf), least - 1]
    if most < math.inf:
        wrong += [most + 1] if isinstance(most, int) else [math.nextafter(most, math.inf)]
    wrong += [1.5] if isinstance(least, int) else []
    wrong += [2] if "pool" in key else []
    for value in wrong:
        with pytest.raises(BadParameter) as error:
            parse(spec, **{key: value})
        said = str(error.value)
        names = f"'({re.escape(part)}|{re.escape(spec)})': {key}={re.escape(repr(value))}: "
        assert re.match(names + r".*\buse .+\.$", said), said
    for value in (default, least, most):
        if value is None or math.isfinite(value):
            assert parse(spec, **{key: value})


DEFAULTS = """
    kvkeep:window=32:pool=7:block=16:sinks=4:alpha=0.5
    kvkeep_context:chunk=2048:sinks=4:floor=0.35:norm=2
    kvkeep_lookahead:tokens=32:window=32:pool=7:block=8:sinks=4:alpha=0.5:hold=8:norm=2
    intentkv:window=64:block=16:smooth=8:recent=0:sinks=0
    intelllm:head_gravity=6:window=64
    ahakv:recent=32:pool=5:value_pool=5
    protokv:kappa=5:anchors=32:bits=2
    satkv:kappa=5
    streamingllm:sinks=4
    lm_infinite:sinks=10
    snapkv:window=64:pool=5
    lookahead:tokens=8:window=64:pool=5:norm=1
    pyramidkv:window=8:pool=5:beta=20
    chunkkv:window=32:chunk=10:reuse=2
    nacl:window=32:random=0.7
    cake:window=32:gamma=200.0:pool=5:tau1=1.0:tau2=1.0
    keep_prompt_random:buffer=128
    lagkv:sinks=4:lag=128
    echo:chunk=2048:sinks=4:gap=20
    kvzip:chunk=2048:sinks=4:norm=0
    kvzip_plus:chunk=2048:sinks=4:norm=0
    expected_attention:future=512:sinks=4
    compactor:sketch=48:chunk=256:sinks=8:recent=4:ridge=0.01
    rkv:buffer=128:window=8:pool=7:importance=0.1:alike=0.5
    actqkv:window=256:representatives=32:question_weight=0.0
    infllm:window=256:representatives=4
    qllm:window=256:representatives=4:weight=4.0
    tokenselect:window=256:similar=0.9
    emllm:window=256:gamma=1.0:longest=128:contiguity=0.3:representatives=4
    quest:sinks=0
    clusterkv:tokens=80:iterations=20
    squeezed:tokens=20:iterations=20:threshold=0.05
    sentencekv:longest=128
    snapkv+adakv:alpha=0.2
    snapkv+shared:floor=0.0
    snapkv+critical:share=0.5:offset=0.0001
    snapkv+threshold:tau=0.001
    snapkv+pyramid:beta=20
    snapkv+cake:tau1=1.0:tau2=1.0
    snapkv+blocks:block=16
    snapkv+prototypes:kappa=5:anchors=32:bits=2
    snapkv+values:power=1.0:value_pool=5
    snapkv+sinks:first=4
"""


def test_the_usual_numbers_of_a_method_are_these():
    """A number of a paper, or a choice measured in docs/RESULTS.md, changes here too."""
    for written in DEFAULTS.split():
        spec = written.split(":")[0]
        assert replace(parse(written), name=spec) == parse(spec), written
    usual = {(spec, key) for spec, _, key, default in NUMBERS if default is not None and key != "seed"}
    assert usual == {(each.split(":")[0], key) for each in DEFAULTS.split() for key in re.findall(r":(\w+)=", each)}


def test_a_range_is_said_in_words():
    said = {
        "snapkv:window=0": "'snapkv': window=0: use a whole number, 1 or more.",
        "snapkv:pool=2": "'snapkv': pool=2: use a whole number, odd, 1 or more.",
        "snapkv:pooling=sum": "'snapkv': pooling='sum': use 'avg' or 'max'.",
        "snapkv+threshold:tau=nan": "'+threshold': tau=nan: use a finite number.",
        "cake:gamma=nan": "'cake': gamma=nan: use a finite number.",
        "cake:gamma=-1": "'cake': gamma=-1.0: use 0 or more.",
        "quest:page=0": "'quest': page=0: use a whole number, 1 or more, or None.",
        "emllm:contiguity=1.0": "'emllm': contiguity=1.0: use 0 or more, less than 1.",
        "snapkv+auto:coverage=0.0": "'snapkv+auto:coverage=0.0': coverage=0.0: use more than 0, up to 1, or None.",
        "rkv:importance=2": "'rkv': importance=2.0: use 0 to 1.",
        "lagkv:lag=2147483648": "'lagkv': lag=2147483648: use a whole number, 2 or more, below 2**31.",
    }
    for spec, text in said.items():
        with pytest.raises(BadParameter) as error:
            parse(spec)
        assert str(error.value) == text


@dataclass(frozen=True)
class Plain:
    """A scorer of another package, which declares nothing."""

    power: float = 1.0
    size: int = None  # type: ignore[assignment]

    def __call__(self, seen, budget):
        return seen.keys.norm(dim=-1) ** self.power


@dataclass(frozen=True)
class Declared(Plain, Checked):
    power: Annotated[float, Range(1, 3)] = 1.0
    size: int | None = None


def test_a_plugin_need_not_declare_ranges_and_may(monkeypatch):
    monkeypatch.setattr(METHODS, "plugins", "")
    for name, kind in (("plain", Plain), ("declared", Declared)):
        kvkeep.register_method(name)(lambda power=1.0, kind=kind: kvkeep.Method(scorer=kind(power)))
    try:
        assert parse("plain:power=-7").scorer.power == -7.0
        for spec in ("plain:power=nan", "plain:power=inf"):
            with pytest.raises(BadParameter, match=r"^'plain': power=(nan|inf): use a finite number\.$"):
                parse(spec)
        with pytest.raises(BadParameter, match="the scorer Plain: power=nan: use a finite number"):
            kvkeep.Method(scorer=Plain(math.nan))
        with pytest.raises(BadParameter, match=r"^'declared': power=4.0: use 1 to 3\.$"):
            parse("declared:power=4")
    finally:
        del METHODS["plain"], METHODS["declared"]
