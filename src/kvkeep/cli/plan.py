"""`kvkeep plan`: the memory that conversations take, on the device and on the host, from a model's config alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvkeep.cache.report import format_bytes
from kvkeep.compress.method import STORAGE
from kvkeep.errors import BadInput
from kvkeep.storage import history
from kvkeep.storage.history import BlockFormat

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Place:
    """One way to keep conversations, and the bytes that it takes."""

    name: str
    device_bytes: int
    host_bytes: int
    loses: str = ""  # what the next turn cannot attend to


@dataclass(frozen=True)
class Shape:
    """What a model's config says of its keys and values."""

    layers: int  # of full attention
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        part = config.get_text_config(decoder=True)
        heads = part.num_attention_heads
        kinds = getattr(part, "layer_types", None) or ["full_attention"] * part.num_hidden_layers
        kv_heads = getattr(part, "num_key_value_heads", None) or heads
        dim = getattr(part, "head_dim", None) or part.hidden_size // heads
        return cls(kinds.count("full_attention"), kv_heads, dim)

    def nbytes(self, tokens: int, dtype: torch.dtype, storage: str | None = None) -> int:
        """Bytes of so many tokens in all layers."""
        form = BlockFormat(self.kv_heads, self.dim, self.dim, dtype, STORAGE[storage])
        return tokens * form.nbytes * self.layers // history.BLOCK


def places(shape: Shape, context: int, chats: int, budget: int | float, dtype: torch.dtype) -> list[Place]:
    """Every way, for so many conversations of so many tokens."""
    kept = min(context, int(budget * context) if isinstance(budget, float) else budget)
    whole, on_device = chats * shape.nbytes(context, dtype), chats * shape.nbytes(kept, dtype)
    streamed = 2 * shape.nbytes(context, dtype) // max(1, shape.layers)  # of the turn under way
    found = [Place("full: all on the device", whole, 0)]
    for storage in (None, "int8", "int4"):
        if storage != "int4" or shape.dim % 2 == 0:
            how = f"history in {storage or str(dtype).removeprefix('torch.')}"
            host = chats * shape.nbytes(context, dtype, storage)
            found.append(Place(how, on_device + streamed, host))
    return [*found, Place("no history", on_device, 0, "what was evicted")]


def table(given: Any, budget: int | float) -> dict[str, Any]:
    """Facts and places, as JSON."""
    from kvkeep.model.load import load_config, load_context_length

    if given.dtype not in DTYPES:
        raise BadInput(f"--dtype {given.dtype}: use one of {', '.join(DTYPES)}.")
    shape = Shape.of(load_config(given.model))
    context = given.context or load_context_length(given.model)
    found = places(shape, context, given.chats, budget, DTYPES[given.dtype])
    facts = {"model": given.model, "context": context, "chats": given.chats, "budget": budget, "dtype": given.dtype}
    return facts | asdict(shape) | {"places": [asdict(each) for each in found]}


def text(facts: dict[str, Any]) -> str:
    budget = f"{facts['budget']:,}" if isinstance(facts["budget"], int) else f"{facts['budget']:.1%}"
    shape = f"{facts['layers']} layers × {facts['kv_heads']} KV heads of {facts['dim']}, {facts['dtype']}"
    lines = [
        f"{facts['chats']:,} conversations of {facts['context']:,} tokens, {budget} kept per KV head ({shape})",
        f"{'':26}{'device':>10}{'host':>12}",
    ]
    for each in facts["places"]:
        host = format_bytes(each["host_bytes"]) if each["host_bytes"] else "–"
        loses = f"   the next turn cannot see {each['loses']}" if each["loses"] else ""
        lines.append(f"{each['name']:26}{format_bytes(each['device_bytes']):>10}{host:>12}{loses}")
    return "\n".join([*lines, "Weights and activations come on top."])
