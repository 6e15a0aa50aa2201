"""What one client may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.cache.report import format_bytes
from kvkeep.serve.failure import BUSY, Failure
from kvkeep.serve.job import Job


@dataclass(frozen=True)
class Limits:
    max_body: int = 4_000_000  # bytes
    max_tokens: int = 4096  # of an answer; also of one that asks for no number
    max_seconds: float = 600.0  # until an answer is complete
    max_answers: int = 64  # under way for one key
    max_contexts: int = 64  # of one key
    max_context_bytes: int | None = None  # of one key; None: as many as the store has
    allow_parameters: bool = False  # of methods, from clients: some values make one step take hours

    def check_contexts(self, sizes: list[int]) -> None:
        """Refuse too many contexts. sizes: in bytes, of all that a key has, or would have"""
        if len(sizes) > self.max_contexts:
            said = f"this key has {self.max_contexts} contexts, and may have no more"
        elif sum(sizes) > (self.max_context_bytes or sum(sizes)):
            said = f"the contexts of this key may have {format_bytes(self.max_context_bytes or 0)}, and would have more"
        else:
            return
        raise Failure(429, f"{said}; remove one: DELETE /v1/contexts/ID.", "too_many_contexts")

    def check(self, job: Job, under_way: int) -> None:
        """Refuse a job beyond the limits. under_way: answers of the same key"""
        if ":" in job.options.get("method", "") and not self.allow_parameters:
            said = "this server takes no parameters of methods from clients; give the names alone, as in snapkv+adakv, "
            raise Failure(400, f"{said}or have it started with --allow-parameters.", param="kvkeep")
        if (job.max_tokens or 0) > self.max_tokens:
            raise Failure(
                400, f"max_tokens={job.max_tokens}: this server allows {self.max_tokens}.", param="max_tokens"
            )
        if job.num_answers > self.max_answers:
            raise Failure(400, f"{job.num_answers} answers at once: this server allows {self.max_answers}.", param="n")
        if under_way + job.num_answers > self.max_answers:
            said = f"{under_way} answers for this key or address are under way, and {self.max_answers} may be; wait."
            raise Failure(429, said, "too_many_requests", headers=BUSY)
