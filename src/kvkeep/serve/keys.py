"""API keys: who asks."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from kvkeep.errors import BadInput

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
