"""Who asks, by API key, and what one client may ask for."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kvkeep.cache.report import format_bytes
from kvkeep.errors import BadInput
from kvkeep.serve.failure import BUSY, Failure
from kvkeep.serve.job import Job

VARIABLE = "KVKEEP_API_KEYS"  # several, parted by commas


class Keys:
    """Held as digests. Without any, everybody is one owner, called ""."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self.digests = [_digest(secret) for secret in secrets]

    @classmethod
    def load(cls, path: str | None) -> Keys:
        """Load keys from a file with one on every line (# begins a comment), and from the environment."""
        try:
            text = Path(path).read_text(encoding="utf-8") if path else ""
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"the keys in {path!r} cannot be read ({error}); give a text file with one on every line."
            ) from None
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        found = [each for each in [*lines, *(part.strip() for part in os.environ.get(VARIABLE, "").split(","))] if each]
        if path and not any(lines):
            raise BadInput(f"there is no key in {path!r}; write one on every line, e.g. of `openssl rand -hex 32`.")
        return cls(found)

    def __len__(self) -> int:
        return len(self.digests)

    def owner(self, secret: str) -> str | None:
        """A name for whoever has this key; None: nobody has. Takes as long for any key."""
        given = _digest(secret)
        known = [hmac.compare_digest(given, each) for each in self.digests]
        return given.hex()[:16] if any(known) else None if known else ""


def _digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()


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
