"""What /metrics shows, for Prometheus. Nothing of a prompt, an answer or a key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvkeep.engine.request import Request
from kvkeep.engine.store import Store
from kvkeep.serve.answers import Answers, Piece

SECONDS = tuple(round(0.001 * 1.5**power, 4) for power in range(33))  # 1 ms to 7 minutes


class Metrics:
    def __init__(self, live: Iterable[Answers], store: Store) -> None:
        """live: answers under way, counted when somebody looks"""
        self.registry, self.live = CollectorRegistry(), live
        how: Any = {"registry": self.registry}
        self.requests = Counter("kvkeep_requests", "HTTP requests.", ["path", "status"], **how)
        self.prompt_tokens = Counter("kvkeep_prompt_tokens", "Tokens of prompts, cached ones included.", **how)
        self.cached_tokens = Counter("kvkeep_cached_tokens", "Of these, those that were stored.", **how)
        self.answer_tokens = Counter("kvkeep_answer_tokens", "Generated tokens.", **how)
        self.exact = {
            "passes": Counter("kvkeep_exact_passes", "Passes over a history that verified guesses.", **how),
            "guessed": Counter("kvkeep_exact_guessed_tokens", "Tokens guessed for exact answers.", **how),
            "right": Counter("kvkeep_exact_right_tokens", "Of these, those that were right.", **how),
        }
        self.first = Histogram(
            "kvkeep_first_token_seconds", "From a request to its first text.", buckets=SECONDS, **how
        )
        self.between = Histogram("kvkeep_between_tokens_seconds", "From text to text.", buckets=SECONDS, **how)
        total = self._total
        gauges = {
            "kvkeep_answers_waiting": ("Answers without a first token.", total(lambda each: not each.first_token_s)),
            "kvkeep_answers_running": ("Answers that are decoded.", total(lambda each: bool(each.first_token_s))),
            "kvkeep_kept_bytes": (
                "Keys and values kept of the prompts under way.",
                total(lambda each: each.kept_bytes),
            ),
            "kvkeep_kept_tokens": ("The same in tokens per KV head.", total(lambda each: each.kept_tokens)),
            "kvkeep_prefix_bytes": ("Compressed prefixes in the store.", lambda: store.nbytes),
            "kvkeep_prefixes": ("How many these are.", lambda: len(store.entries)),
            "kvkeep_unsaved_prefixes": (
                "Prefixes that could not be saved, as on a full disk.",
                lambda: store.num_unsaved,
            ),
            "kvkeep_history_bytes": (
                "Keys and values of whole conversations and texts, in host memory.",
                lambda: store.histories.nbytes if store.histories else 0,
            ),
            "kvkeep_unsaved_blocks": (
                "Blocks of these that could not be saved, as on a full disk.",
                lambda: store.histories.num_unsaved if store.histories else 0,
            ),
            "kvkeep_seen_tokens": (
                "Tokens of these prompts.",
                total(lambda each: each.first_token_s and len(each.ids)),
            ),
        }
        for name, (text, count) in gauges.items():
            Gauge(name, text, **how).set_function(count)

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def watch(self, answers: Answers) -> None:
        """Time its pieces, each when it goes to its client."""
        last: dict[int, float] = {}

        def observe(piece: Piece) -> None:
            now = time.perf_counter()
            if piece.index in last:
                self.between.observe(now - last[piece.index])
            else:
                self.first.observe(now - answers.began)
            last[piece.index] = now

        answers.observe = observe

    def count(self, answers: Answers) -> None:
        """Count answers when their client has them, or is gone."""
        if answers.answers:
            usage = answers.usage
            self.prompt_tokens.inc(usage.prompt)
            self.cached_tokens.inc(usage.cached)
            self.answer_tokens.inc(usage.answer)
            for name, number in usage.kept.get("exact", {}).items():
                self.exact[name].inc(number)

    def _total(self, measured: Callable[[Request], float]) -> Callable[[], float]:
        """Give a function that adds up what is measured of the requests under way."""

        def count() -> float:
            requests = [each.request for answers in list(self.live) for each in answers.answers]
            return sum(measured(each) for each in requests if not each.done)

        return count


class FrontMetrics:
    """Counts at the way in to several replicas."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        how: Any = {"registry": self.registry}
        self.requests = Counter("kvkeep_front_requests", "HTTP requests, to all replicas.", ["path", "status"], **how)
        self.lost = Counter("kvkeep_lost_replicas", "Requests whose replica died.", **how)

    def page(self, replicas: Iterable[tuple[int, str]]) -> bytes:
        """Join the pages of all replicas. replicas: number and page of each"""
        return generate_latest(_Merged(replicas)) + generate_latest(self.registry)


class _Merged(Collector):
    """The pages of several replicas as one, each with its number."""

    def __init__(self, pages: Iterable[tuple[int, str]]) -> None:
        self.pages = sorted(pages)

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for number, page in self.pages:
            for family in text_string_to_metric_families(page):
                merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "replica": str(number)}, sample.value)
        return found.values()
