"""kvkeep as a model of lm-evaluation-harness: contexts are prefilled and compressed, answers scored on that cache.

lm-eval finds models by name only among its own, so its command line is started from here, with this one added:

    python -m kvkeep.evaluate.lm_eval_model --model kvkeep --model_args method=snapkv,budget=512 --tasks arc_easy

Tokens, chat templates, context length and generation are those of lm-eval's Hugging Face model; only prefill differs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.errors import BadInput, BadParameter, KvkeepError, MissingExtra
from kvkeep.model.load import load

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ImportError as error:
    raise MissingExtra(f"this needs lm-eval ({error}): pip install 'kvkeep[harness]'") from error

HFLM_OPTIONS = (  # every other name is a parameter of the method
    "batch_size", "max_batch_size", "max_length", "truncation", "add_bos_token", "prefix_token_id",
    "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip
Request = tuple[Any, list[int], list[int]]  # (context, continuation) as texts or None, ids of both
Score = tuple[float, bool]  # log-likelihood, and whether greedy decoding would give just this

log = logging.getLogger(__name__)
ONE_TOKEN = (
    "%d of %d continuations are one token long: prefill predicts it, before anything is evicted, so these scores are "
    "those of the full cache, whatever the method"
)


@register_model("kvkeep")
class KvkeepLM(HFLM):
    """A model that attends to what a method keeps of its context."""

    def __init__(
        self,
        pretrained: Any = "default",
        method: str = "kvkeep",
        budget: int | float | str | None = None,
        *,
        tokenizer: Any = None,
        device: Any = None,
        dtype: Any = None,
        **parameters: Any,
    ) -> None:
        """pretrained: "default", a hub id, a folder, or a model that is loaded already, with its tokenizer."""
        options = {name: parameters.pop(name) for name in HFLM_OPTIONS if name in parameters}
        model = pretrained
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # not asked for: it is the default of lm-eval's command line
        if isinstance(pretrained, str):
            model, own = load(pretrained, device=device, dtype=dtype)
            tokenizer = tokenizer or own
        super().__init__(model, tokenizer=tokenizer, **options)
        self.pretrained = model.name_or_path
        self.new_cache = partial(Cache, model, method, budget, **parameters)
        self.method = self.new_cache().method  # a wrong name or budget is refused before any prefill
        self.compresses = bool(self.method.scorer or self.method.retrieval)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        """Every context is prefilled and compressed once; each continuation is scored on a fork of that cache."""
        if self.compresses and (short := sum(len(ids) == 1 for *_, ids in requests)):
            log.warning(ONE_TOKEN, short, len(requests))
        scores: dict[int, Score] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for context, indices in self._by_context(requests).items():
                cache = self.new_cache()
                logits = self._forward(cache, context, last=1)
                for index in indices:
                    texts, _, ids = requests[index]
                    scores[index] = self._score(cache.fork(), logits, ids)
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, scores[index])
                    bar.update()
        return [scores[index] for index in range(len(requests))]

    def _by_context(self, requests: Sequence[Request]) -> dict[tuple[int, ...], list[int]]:
        """Indices of requests. What exceeds the context length loses its beginning, as in lm-eval."""
        indices: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, ids) in enumerate(requests):
            if not 0 < len(ids) <= self.max_length:
                raise BadInput(f"a continuation has {len(ids)} tokens; 1 to {self.max_length} can be scored.")
            room = self.max_length + 1 - len(ids)  # the last token is scored but never an input
            if len(context) > room:
                log.warning("the first %d of %d context tokens are left out", len(context) - room, len(context))
            indices.setdefault(tuple(context[-room:]), []).append(index)
        return indices

    def _score(self, cache: Cache, logits: Tensor, ids: list[int]) -> Score:
        """logits [1, vocabulary] after the context, for the first token

        Retrieval methods get a continuation token by token, as in decode: of a chunk they may attend to every token.
        """
        chunks = [[token] for token in ids[:-1]] if self.method.retrieval else [ids[:-1]]
        logits = torch.cat([logits, *(self._forward(cache, chunk) for chunk in chunks if chunk)])
        targets = torch.tensor(ids, device=logits.device)
        scores = logits.float().log_softmax(-1).gather(1, targets[:, None])
        return float(scores.sum()), bool((logits.argmax(-1) == targets).all())

    def _forward(self, cache: Cache, ids: Sequence[int], last: int = 0) -> Tensor:
        """One forward pass. -> logits of its last tokens, 0: of all of them [n, vocabulary]"""
        with torch.inference_mode():
            batch = torch.tensor([list(ids)], device=self.model.device)
            return self.model(batch, past_key_values=cache, logits_to_keep=last).logits[0]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts: there is no context to compress, so only `full` is allowed."""
        if self.compresses:
            raise BadParameter(
                f"a text scored from its first token has no context to compress: '{self.method.name}' would be given "
                "the perplexity of the full model; use method=full, or tasks that score a continuation."
            )
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """transformers' own generation, greedy or sampled as the task says, over a compressed cache."""
        return super()._model_generate(context, max_length, stop, past_key_values=self.new_cache(), **options)


def main() -> None:
    """lm-eval's command line, with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except KvkeepError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
