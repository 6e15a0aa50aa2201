"""One forward pass for chunks of several sequences, packed one after the other: a prefill, or a token of each."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.passes import run_passes
from kvkeep.engine.sequence import Sequence
from kvkeep.model.chunked_mlp import long_prompt
from kvkeep.model.fused import fused_ops
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter
from kvkeep.storage.history import read_together
from kvkeep.storage.upload import upload

NextTokens = tuple[Sequence, Tensor]  # a sequence, and ids that follow those it has seen [q]
AfterLayer = Callable[[int], None]


class PackedForward(HFCacheAdapter):
    """Norms, MLPs and projections run over all tokens at once; each sequence attends through its own cache."""

    seen = 0  # every token has a position id

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.spans: list[tuple[Sequence, slice]] = []
        self.after_layer: AfterLayer | None = None
        self.shares_forward = len(self.compressed_layers) == len(self.layers)  # others would mix the sequences

    def __call__(
        self, chunks: Seq[NextTokens], keep: Seq[int] | None = None, after_layer: AfterLayer | None = None
    ) -> list[Tensor]:
        """Run one pass. -> for each chunk the logits of its last tokens, by default of one [keep, vocabulary]

        after_layer: called with the layer's number where something else has to be launched between layers
        """
        counts = [1] * len(chunks) if keep is None else keep
        if not self.shares_forward or (len(chunks) == 1 and after_layer is None):
            return [sequence.forward(ids, n) for (sequence, ids), n in zip(chunks, counts, strict=True)]
        ends = list(accumulate((len(ids) for _, ids in chunks), initial=0))
        spans = [slice(*span) for span in pairwise(ends)]
        self.spans = [(sequence, span) for (sequence, _), span in zip(chunks, spans, strict=True)]
        shown = [
            span if sequence.needs_all_logits else slice(span.stop - n, span.stop)
            for (sequence, span), n in zip(self.spans, counts, strict=True)
        ]
        self.after_layer = after_layer
        known = [history for sequence, _ in chunks if (history := sequence.history)]
        try:
            with read_together(known):
                logits = self._forward(chunks, torch.cat([torch.arange(span.start, span.stop) for span in shown]))
        finally:
            self.spans, self.after_layer = [], None
        parts = logits.split([span.stop - span.start for span in shown])
        for (sequence, ids), part in zip(chunks, parts, strict=True):
            sequence.after_forward(ids, part)
        return [part[-n:] for part, n in zip(parts, counts, strict=True)]

    def _forward(self, chunks: Seq[NextTokens], shown: Tensor) -> Tensor:
        for sequence, ids in chunks:
            sequence.before_forward(ids)
        ids = torch.cat([ids for _, ids in chunks])[None]
        positions = torch.cat([torch.arange(each.cache.seen, each.cache.seen + len(new)) for each, new in chunks])[None]
        device = chunks[0][0].config.device
        every = 0 if len(shown) == ids.shape[1] else upload(shown, device)
        with torch.inference_mode(), fused_ops(self.model, every), long_prompt(self.model, ids.shape[1]):
            return self.model(
                upload(ids, device), position_ids=upload(positions, device), past_key_values=self, logits_to_keep=every
            ).logits[0]

    def before_forward(self) -> None:
        for sequence, _ in self.spans:
            sequence.cache.before_forward()

    def after_forward(self, ids: Tensor | None, positions: Tensor | None) -> None:
        assert ids is not None and positions is not None
        for sequence, span in self.spans:
            sequence.cache.note_text(ids[:, span], positions[:, span])
        run_passes([sequence.cache for sequence, _ in self.spans])

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        outputs = [sequence.cache.attend(index, call.tokens(span))[0] for sequence, span in self.spans]
        if self.after_layer:
            self.after_layer(index)
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], None
