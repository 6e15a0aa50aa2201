"""Which tokens of a prompt that is too long are kept: half-open ranges, by the rule of each harness."""

from __future__ import annotations

from kvkeep.registry import Registry

Ranges = list[tuple[int, int]]


def both_ends(tokens: int, limit: int) -> Ranges:
    """LongBench, InfiniteBench for local models: two halves, so an odd limit loses a token."""
    half = limit // 2
    return _unless_short(tokens, limit, [(0, half), (tokens - half, tokens)])


def both_ends_all(tokens: int, limit: int) -> Ranges:
    """InfiniteBench for GPT-4: the second half has the odd token."""
    half = limit // 2
    return _unless_short(tokens, limit, [(0, half), (tokens - (limit - half), tokens)])


def head(tokens: int, limit: int) -> Ranges:
    """kvpress."""
    return [(0, min(tokens, limit))]


def _unless_short(tokens: int, limit: int, ranges: Ranges) -> Ranges:
    return ranges if tokens > limit else [(0, tokens)]


RULES = Registry(
    "truncation rule",
    longbench=both_ends,
    infinitebench_local=both_ends,
    infinitebench_gpt4=both_ends_all,
    kvpress=head,
)


def tokens_kept(tokens: int, max_length: int, rule: str = "longbench", **_) -> float:
    return float(sum(end - start for start, end in RULES[rule](tokens, max_length)))
