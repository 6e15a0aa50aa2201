"""What the answers to a load say: rates, latencies, and a table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

from stream_client import Answer

LATENCIES = {"ttft": "first token", "itl": "between tokens", "gap": "between events", "tpot": "mean of an answer's"}
LATENCIES |= {"e2e": "whole answer", "client_lag": "this client, late"}
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
LATE = 0.2  # of the time between tokens: then client_lag matters


def figures(load: Any, answers: list[Answer], lags: list[float]) -> dict[str, Any]:
    """Of the answers that are whole; of the others why they are not. lags: seconds"""
    wrong = [each for each in answers if each.failure]
    whole = [each for each in answers if not each.failure]
    row: dict[str, Any] = {"answered": len(whole), "failed": dict(Counter(each.failure for each in wrong))}
    if wrong:
        row["first_failure"] = f"{wrong[0].failure}: {wrong[0].said}"
    if not whole:
        return row
    seconds = max(each.ended for each in whole) - min(each.began for each in answers)
    row |= rates(load, whole, seconds) | goodput(load, whole, seconds) | lengths(load, whole)
    row["most_under_way"] = most_at_once((each.began, each.ended) for each in answers if each.began)
    row["most_streaming"] = most_at_once((each.events[0][0], each.events[-1][0]) for each in answers if each.events)
    return row | {f"{name}_s": spread(values) for name, values in latencies(whole, lags).items()}


def rates(load: Any, whole: list[Answer], seconds: float) -> dict[str, float]:
    read = sum((each.usage or {}).get("prompt_tokens") or load.prompt_tokens for each in whole)
    found = {"requests": len(whole), "prompt_tokens": read, "output_tokens": sum(each.num_tokens for each in whole)}
    return {"total_s": round(seconds, 5)} | {f"{name}_per_s": round(n / seconds, 3) for name, n in found.items()}


def goodput(load: Any, whole: list[Answer], seconds: float) -> dict[str, Any]:
    """Requests a second that met the goals."""
    first, between = load.options.goal_ttft, load.options.goal_itl
    if first is None and between is None:
        return {}
    met = sum(
        (first is None or each.first_token_s <= first) and (between is None or each.mean_gap <= between)
        for each in whole
    )
    return {"goal_ttft": first, "goal_itl": between, "met": met, "goodput_per_s": round(met / seconds, 3)}


def lengths(load: Any, whole: list[Answer]) -> dict[str, Any]:
    """How long the server says prompts and answers are."""
    counted = [each.usage for each in whole if each.usage]
    return {
        "prompt_tokens_median": median(each.get("prompt_tokens", 0) for each in counted) if counted else None,
        "tokens_from_usage": len(counted) == len(whole),
        "cached_tokens": sum((each.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for each in counted),
        "answers_of_another_length": sum(each.num_tokens != load.answer_tokens for each in whole),
    }


def latencies(whole: list[Answer], lags: list[float]) -> dict[str, list[float]]:
    return {
        "ttft": [each.first_token_s for each in whole],
        "itl": [gap for each in whole for gap in each.token_gaps],
        "gap": [gap for each in whole for gap in each.gaps],
        "tpot": [each.mean_gap for each in whole if len(each.events) > 1],
        "e2e": [each.ended - each.began for each in whole],
        "client_lag": lags,
    }


def spread(values: list[float]) -> dict[str, float] | None:
    """Quantiles, by linear interpolation."""
    ordered, found = sorted(values), {}
    for name, share in SHARES.items() if ordered else ():
        place = (len(ordered) - 1) * share
        low = int(place)
        above = ordered[min(low + 1, len(ordered) - 1)]
        found[name] = round(ordered[low] + (above - ordered[low]) * (place - low), 5)
    return found or None


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The most of these that overlap."""
    changes = sorted(change for start, end in spans for change in ((start, 0), (end, 1)))
    most = now = 0
    for _, is_end in changes:
        now += -1 if is_end else 1
        most = max(most, now)
    return most


def table(row: dict[str, Any]) -> str:
    how = f"{row['rate']} a second" if row["rate"] else f"{row['at_once'] or 'all'} at once"
    name = " ".join(filter(None, (row["label"], row["setting"], f"run {row['run']}")))
    lines = [f"{name}: {row['requests']} × {row['prompt_tokens']:,} + {row['answer_tokens']:,} tokens, {how}"]
    if row["failed"]:
        failed = ", ".join(f"{count} × {why}" for why, count in row["failed"].items())
        lines.append(f"failed: {failed}; the first: {row['first_failure']}")
    if row["answered"]:
        lines += [*_rate_lines(row), *_latency_lines(row)]
    return "\n  ".join(lines)


def _rate_lines(row: dict[str, Any]) -> list[str]:
    prompts, output = row["prompt_tokens_per_s"], row["output_tokens_per_s"]
    lines = [f"{row['answered']} answered in {row['total_s']:.2f} s: {row['requests_per_s']:.2f} requests/s"]
    lines.append(f"{prompts:,.0f} prompt tokens/s, {output:,.1f} tokens/s of answers")
    lines.append(f"at most {row['most_under_way']} under way, {row['most_streaming']} stream at once")
    if "met" in row:
        lines.append(f"{row['met']} met the goals: {row['goodput_per_s']:.2f} requests/s")
    if row["cached_tokens"]:
        lines.append(f"{row['cached_tokens']:,} tokens of prompts were cached")
    if count := row["answers_of_another_length"]:
        lines.append(f"{count} answers have another length than {row['answer_tokens']} tokens")
    if not row["tokens_from_usage"]:
        lines.append("the server does not count tokens: every event is taken for one")
    return lines


def _latency_lines(row: dict[str, Any]) -> list[str]:
    found = {name: row[f"{name}_s"] for name in LATENCIES if row[f"{name}_s"]}
    lines = [f"{'seconds':22}" + "".join(f"{name:>10}" for name in SHARES)]
    for name, values in found.items():
        lines.append(f"{LATENCIES[name]:22}" + "".join(f"{value:10.4f}" for value in values.values()))
    if {"itl", "client_lag"} <= found.keys() and found["client_lag"]["p99"] > LATE * found["itl"]["p50"]:
        lines.append("this client was late itself: give it more CPU before you read latencies")
    return lines
