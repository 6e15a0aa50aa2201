"""The papers' claims, in shape, on the default model: python benchmarks/claims.py --haystack DIR [--out FILE]

DIR holds plain-text prose (*.txt). Needles are 7-digit numbers; the question comes last and is prefilled with the text.
Every table is printed as Markdown; docs/CLAIMS.md is this script's output with a comment on each.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from claims_attention import QUESTIONS, STRETCHES, THRESHOLDS, boundaries, positions
from claims_attention import hits as answer_hits
from torch import Tensor

import kvkeep
from kvkeep.compress.attention import attention, outlier_degree
from kvkeep.compress.guard import Guard
from kvkeep.compress.method import Method
from kvkeep.model.load import load, quiet_transformers
from kvkeep.types import Observation

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
QUESTION = QUESTIONS[0]
ANSWER = 40  # tokens of an answer: a sentence that repeats the question, 7 digits, and room to spare


@dataclass
class Lab:
    """A model, its tokenizer, and prose to hide things in."""

    model: object
    tokenizer: object
    prose: list[int]
    samples: int
    batch: int

    def stretch(self, seed: int, tokens: int) -> list[int]:
        start = random.Random(seed).randrange(len(self.prose) - tokens)
        return self.prose[start : start + tokens]

    def needle(self, seed: int, tokens: int, question: str = QUESTION) -> tuple[Tensor, str]:
        """A prompt of about this many tokens with a number hidden at one of five depths."""
        number = str(random.Random(seed).randint(1_000_000, 9_999_999))
        sentences = self.tokenizer.decode(self.stretch(seed, tokens - 90)).split(". ")
        cut = int(len(sentences) * DEPTHS[seed % 5])
        hidden = f"\nThe special magic number for the lighthouse is {number}. Remember it.\n"
        text = ". ".join(sentences[:cut]) + ". " + hidden + ". ".join(sentences[cut:])
        chat = [{"role": "user", "content": f"{text}\n\n{question}"}]
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids[0], number

    def found(self, spec: str, budget: int, tokens: int, **parameters) -> float:
        """Share of needles answered rightly from the compressed cache."""
        right = 0
        for start in range(0, self.samples, self.batch):
            drawn = [self.needle(seed, tokens) for seed in range(start, min(start + self.batch, self.samples))]
            longest = max(len(ids) for ids, _ in drawn)
            rows = torch.zeros(len(drawn), longest, dtype=torch.long)
            mask = torch.zeros_like(rows)
            for row, (ids, _) in enumerate(drawn):
                rows[row, longest - len(ids) :], mask[row, longest - len(ids) :] = ids, 1
            cache = kvkeep.Cache(self.model, spec, budget, **parameters)
            device = self.model.device
            out = self.model.generate(
                rows.to(device),
                attention_mask=mask.to(device),
                past_key_values=cache,
                max_new_tokens=ANSWER,
                do_sample=False,
            )
            answers = self.tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
            right += sum(number in answer for answer, (_, number) in zip(answers, drawn, strict=True))
        return right / self.samples

    def surprise(self, method: str | Method, budget: int, tokens: int, **options) -> float:
        """Mean negative log-likelihood of the next 100 tokens of prose, given the compressed cache."""
        losses = self.losses(method, budget, tokens, **options)
        return sum(losses) / len(losses)

    def losses(
        self, method: str | Method, budget: int, tokens: int, chunk: int | None = None, steps=False, **parameters
    ) -> list[float]:
        """The same, of every sample.

        chunk: prefill chunk size, all tokens if None
        steps: the next tokens one at a time, as in decode
        """
        losses = []
        for seed in range(self.samples):
            ids = torch.tensor(self.stretch(1000 + seed, tokens + 100), device=self.model.device)[None]
            cache = kvkeep.Cache(self.model, method, budget, **parameters)
            for part in ids[:, :tokens].split(chunk or tokens, 1):
                self.model(part, past_key_values=cache, logits_to_keep=1)
            parts = ids[:, tokens:-1].split(1 if steps else 100, 1)
            logits = torch.cat([self.model(part, past_key_values=cache).logits[0].float() for part in parts])
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, tokens + 1 :]).item())
        return losses

    def watch(self, look: Callable, ids: Tensor, voters: int) -> list:
        """`look` of every layer's observation of a prompt."""
        looks = []

        def spy(seen, budget):
            looks.append(look(seen))
            return torch.zeros(seen.keys.shape[:2], device=seen.keys.device)

        cache = kvkeep.Cache(self.model, Method("spy", spy, observation_window=voters), 1)
        self.model(ids[None].to(self.model.device), past_key_values=cache, logits_to_keep=1)
        return looks


def table(title: str, head: Iterable[str], rows: Iterable[Iterable]) -> str:
    lines = [f"\n## {title}\n", "| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * lines[-1].count(" | ") + "---|")
    for row in rows:
        cells = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def intent(lab: Lab) -> str:
    budgets = (256, 512)
    tries = [{"block": b} for b in (1, 4, 8, 16, 64, 256)] + [{"window": w} for w in (32, 128)]
    tries += [{"boundary": b, "smooth": s} for b in ("first", "subsequent") for s in (8, 4, 1)]
    tries += [{"intention": False}, {"intention": False, "block": 1}, {"sinks": 4, "recent": 16}]
    rows = [[named(t), *(lab.found("intentkv", budget, 2000, **t) for budget in budgets)] for t in tries]
    return table("IntentKV: block size and ablations (needle, 2,000 tokens)", ["change", *map(str, budgets)], rows)


def named(options: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "default"


def boundary(lab: Lab) -> str:
    head = ["variant", "exact", "within 4 rows", "`smooth` before to 4 after", "row 0", "quartiles of the offset"]
    return table("Where IntentKV begins the question (window 64; query heads of all layers)", head, boundaries(lab))


def aha(lab: Lab) -> str:
    budgets = (256, 512)
    tries = [{}, {"recent_only": False}, {"step_gain": False}, {"value_prior": False}]
    tries += [{"decode_prior": True}, {"gain": "multiply"}]
    rows = []
    for t in tries:
        found = [lab.found("ahakv", budget, 2000, **t) for budget in budgets]
        rows.append([named(t), *found, lab.surprise("ahakv", 256, 1500, steps=True, **t)])
    head = ["change", *map(str, budgets), "loss of the next 100 tokens, decoded one by one, budget 256"]
    return table("AhaKV: its parts (needle, 2,000 tokens; loss after 1,500 tokens of prose)", head, rows)


def bias(lab: Lab) -> str:
    scores, kept, above = positions(lab)
    tenths = [f"{i * 10}–{i * 10 + 10} %" for i in range(STRETCHES)]
    where, spread = "3,600 tokens of prose, budget 720, by tenth of the text", ("mean place", "entropy / uniform")
    texts = [
        table(f"Share of the eviction score: {where}", ["method", *tenths], scores),
        table(
            f"Share of the tokens kept: {where}",
            ["method", *tenths, *spread, *(f"{name}, recent ones apart" for name in spread)], kept,
        ),
        table(
            "Share of tokens with at least this share of their head's highest score",
            ["score", *(f"{limit:g}" for limit in THRESHOLDS)], above,
        ),
    ]  # fmt: skip
    return "\n".join(texts)


def tenth(attended: Tensor, degree: Tensor) -> float:
    """Share of these tokens' attention that the tenth of highest degree gets; mean over KV heads."""
    top = degree >= degree.quantile(0.9, dim=1, keepdim=True)
    return float(((attended * top).sum(1) / attended.sum(1)).mean())


def decode_shares(seen: Observation, context: int, ahead: int) -> list[float]:
    """Shares of the attention the last `ahead` queries, those of decoded tokens, give the context.

    The tenth of highest degree; the first 4; the tenth of highest degree among the others.
    """
    part = dict(keys=seen.keys[:, :context], token_positions=seen.token_positions[:, :context])
    degree = outlier_degree(replace(seen, **part, lengths=(context,) * seen.kv_heads), 5)
    attended = attention(seen, ahead).mean((1, 2))[:, :context]
    first = float((attended[:, :4].sum(1) / attended.sum(1)).mean())
    return [tenth(attended, degree), first, tenth(attended[:, 4:], degree[:, 4:])]


def outliers(lab: Lab) -> str:
    context, ahead, shares = 1500, 32, []
    for seed in range(lab.samples):
        ids = torch.tensor(lab.stretch(3000 + seed, context), device=lab.model.device)[None]
        decoded = lab.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ahead, min_new_tokens=ahead, do_sample=False
        )
        shares.append(lab.watch(lambda seen: decode_shares(seen, context, ahead), decoded[0], ahead))
    thirds = torch.tensor(shares).mean(0).chunk(3)  # [layers, 3] each
    asked = [
        "the 10 % of highest outlier degree",
        "the first 4 tokens",
        "without the first 4: the 10 % of highest outlier degree",
    ]
    text = table(
        f"Share of {ahead} decoded tokens' attention to a context of {context:,} tokens, by outlier degree",
        ["tokens of the context", "first layers", "middle layers", "last layers"],
        [[name, *(float(third[:, row].mean()) for third in thirds)] for row, name in enumerate(asked)],
    )

    def evict_outliers(seen, budget):
        return -outlier_degree(seen, 5)

    def evict_random(seen, budget):
        source = torch.Generator().manual_seed(seen.layer)
        return torch.rand(seen.keys.shape[:2], generator=source).to(seen.keys.device)

    guard = Guard(recent=32)
    rows = [["nothing", lab.surprise("full", 1500, 1500)]]
    rows.append(["10 % at random", lab.surprise(Method("random", evict_random, guard), 1350, 1500)])
    rows.append(["10 % of highest outlier degree", lab.surprise(Method("outliers", evict_outliers, guard), 1350, 1500)])
    rows.append(
        [
            "10 % of highest degree, but not the first 4",
            lab.surprise(Method("late", evict_outliers, Guard(4, 32)), 1350, 1500),
        ]
    )
    return text + table("Evicting tokens: mean loss of the next 100 tokens", ["evicted", "loss"], rows)


def hits(lab: Lab) -> str:
    head = [
        "heads",
        "48–33 before",
        "32–17 before",
        "16 before the question",
        "question",
        "answer",
        "random blocks",
        "size",
    ]
    title = "How often the 10 best blocks of 64 hold the answer, by querying segment (of 16; about 4,466 tokens)"
    return table(title, head, answer_hits(lab))


def intel(lab: Lab) -> str:
    rows = []
    variants = {
        "default: gap and head": {},
        "no gap (gap = near)": {"gap": 256},
        "no head (literal)": {"keep_head": False},
        "mode=local": {"mode": "local"},
        "near=64": {"near": 64},
    }
    for label, options in variants.items():
        needle = lab.found("intelllm", 512, 2000, **options)
        rows.append([label, needle, lab.surprise("intelllm", 512, 1500, **options)])
    rows.append(["full", lab.found("full", 512, 2000), lab.surprise("full", 512, 1500)])
    return table(
        "IntelLLM at budget 512: needle, and loss of the next 100 tokens of prose", ["variant", "needle", "loss"], rows
    )


def far(lab: Lab) -> str:
    """Beyond the trained length the same tokens stay at every gap; only where the far ones are placed differs."""
    tokens, budget, near = 12_000, 1024, 256
    gaps = {"no gap (gap = near)": 1, "2 × near": 2, "3 × near (the default)": 3, "8 × near": 8, "16 × near": 16}
    tries = {name: ("intelllm", {"near": near, "gap": times * near}) for name, times in gaps.items()}
    tries |= {"streamingllm": ("streamingllm", {}), "lm_infinite": ("lm_infinite", {}), "full": ("full", {})}
    found = {
        name: torch.tensor(lab.losses(method, budget, tokens, 1024, **options))
        for name, (method, options) in tries.items()
    }
    rows = [[name, _spread(each), _spread(found["no gap (gap = near)"] - each)] for name, each in found.items()]
    title = f"IntelLLM after {tokens:,} tokens, prefilled 1,024 at a time, budget {budget:,}"
    return table(title, ["far tokens end at", "loss of the next 100 tokens", "less than with no gap"], rows)


def _spread(values: Tensor) -> str:
    return f"{values.mean():.3f} ± {1.96 * values.std() / len(values) ** 0.5:.3f}"


EXPERIMENTS = {f.__name__: f for f in (intent, boundary, aha, bias, outliers, hits, intel, far)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--haystack", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--only", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet_transformers()
    model, tokenizer = load(options.model, device=options.device, dtype="float32")
    text = "\n\n".join(path.read_text() for path in sorted(options.haystack.glob("*.txt"))[:30])
    lab = Lab(model, tokenizer, tokenizer(text, add_special_tokens=False).input_ids, options.samples, options.batch)
    with torch.inference_mode():
        for name in options.only:
            text = EXPERIMENTS[name](lab)
            print(text, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
