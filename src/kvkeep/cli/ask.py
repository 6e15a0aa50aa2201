"""One question to one model, with the clock running."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kvkeep
from kvkeep.cli.inputs import Plan
from kvkeep.cli.show import Outcome, busy
from kvkeep.errors import BadInput
from kvkeep.model.load import hush, load
from kvkeep.model.prompt import encode


@dataclass(frozen=True)
class Asker:
    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, name: str, device: str | None, dtype: str | None, say: Callable[[str], None]) -> Asker:
        hush()
        return cls(*load(name, device=device, dtype=dtype, progress=say))

    def encode(self, text: str, max_new_tokens: int) -> torch.Tensor:
        """Prompt ids [1, tokens], through the model's chat template where it has one."""
        ids = encode(self.tokenizer, text)
        window = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        over = ids.shape[1] + max_new_tokens - (window or 0)
        if window and over > 0:
            raise BadInput(
                f"document and question are {ids.shape[1]} tokens and the answer may take {max_new_tokens}, but the "
                f"model's window is {window}: shorten the document by {over} tokens, or pass a --model with a longer "
                f"window."
            )
        return ids.to(self.model.device)

    def warm_up(self, seed: int) -> None:
        """Pay for the first use of the weights before the clock runs."""
        torch.manual_seed(seed)
        with torch.inference_mode():
            self.model(torch.zeros((1, 8), dtype=torch.long, device=self.model.device))

    def ask(
        self, prompt: torch.Tensor, plan: Plan, max_new_tokens: int, chunk: int | None, out: Any, *, quiet: bool
    ) -> Outcome:
        """out: where the answer is written as it comes, or None."""
        cache = kvkeep.Cache(self.model, plan.method, plan.budget, **plan.parameters)
        length = cache.get_seq_length if chunk else None
        with busy(f"{plan.method}: reading {prompt.shape[1]:,} tokens", quiet=quiet, length=length) as say:
            stream = Stream(self.tokenizer, out, on_first=say.stop)
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,
                streamer=stream,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                prefill_chunk_size=chunk,
            )
        report = cache.report().as_dict()
        return Outcome(
            method=plan.method,
            budget=plan.budget,
            answer=stream.text.strip(),
            prompt_tokens=prompt.shape[1],
            new_tokens=len(stream.ids),
            **{key: report[key] for key in ("kept_per_head", "bytes", "full_bytes", "index_bytes")},
            **stream.speed(),
        )


class Stream:
    """A transformers streamer that writes each piece as it comes, and keeps the time."""

    def __init__(self, tokenizer: Any, out: Any, on_first: Callable[[], None]):
        self.tokenizer, self.out, self.on_first = tokenizer, out, on_first
        self.ids: list[int] = []
        self.text = ""
        self.prompt_seen = False
        self.started = self.first = self.last = time.perf_counter()

    def put(self, ids: torch.Tensor) -> None:
        if not self.prompt_seen:  # generate hands over the prompt first
            self.prompt_seen = True
            return
        self.last = time.perf_counter()
        if not self.ids:
            self.first = self.last
            self.on_first()
        self.ids += ids.flatten().tolist()
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character waits for the rest
            self._write(text)

    def end(self) -> None:
        self._write(self.tokenizer.decode(self.ids, skip_special_tokens=True) + "\n")

    def _write(self, text: str) -> None:
        if self.out:
            print(text[len(self.text) :], end="", file=self.out, flush=True)
        self.text = text

    def speed(self) -> dict[str, float | None]:
        rate = (len(self.ids) - 1) / (self.last - self.first) if len(self.ids) > 1 else None
        return {"first_token_s": self.first - self.started, "tokens_per_s": rate}
