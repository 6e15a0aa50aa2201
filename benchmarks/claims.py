"""The papers' claims, in shape, on the default model: python benchmarks/claims.py --haystack DIR [--out FILE]

DIR holds plain-text prose (*.txt). Needles are 7-digit numbers; the question comes last and is seen before compression.
Every table is printed as Markdown; docs/CLAIMS.md is this script's output with a word on each.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import kvkeep
from kvkeep.compress.method import Method
from kvkeep.compress.observe import attention
from kvkeep.compress.outliers import outlier_degree
from kvkeep.compress.window import Guard
from kvkeep.model.load import hush, load
from kvkeep.types import Observation

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
QUESTION = "What is the special magic number for the lighthouse? Answer with the number only."


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

    def needle(self, seed: int, tokens: int) -> tuple[Tensor, str]:
        """A prompt of about this many tokens with a number hidden at one of five depths."""
        number = str(random.Random(seed).randint(1_000_000, 9_999_999))
        sentences = self.tokenizer.decode(self.stretch(seed, tokens - 90)).split(". ")
        cut = int(len(sentences) * DEPTHS[seed % 5])
        hidden = f"\nThe special magic number for the lighthouse is {number}. Remember it.\n"
        text = ". ".join(sentences[:cut]) + ". " + hidden + ". ".join(sentences[cut:])
        chat = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
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
                max_new_tokens=16,
                do_sample=False,
            )
            answers = self.tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
            right += sum(number in answer for answer, (_, number) in zip(answers, drawn, strict=True))
        return right / self.samples

    def surprise(self, method: str | Method, budget: int, tokens: int, ahead: int = 100, **parameters) -> float:
        """Mean negative log-likelihood of the next tokens of prose, read from the compressed cache."""
        losses = []
        for seed in range(self.samples):
            ids = torch.tensor(self.stretch(1000 + seed, tokens + ahead), device=self.model.device)[None]
            cache = kvkeep.Cache(self.model, method, budget, **parameters)
            self.model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
            logits = self.model(ids[:, tokens:-1], past_key_values=cache).logits[0].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, tokens + 1 :]).item())
        return sum(losses) / len(losses)

    def watch(self, look: Callable, ids: Tensor, voters: int) -> list:
        """What `look` makes of every layer's observation of a prompt."""
        noted = []

        def spy(seen, budget):
            noted.append(look(seen))
            return torch.zeros(seen.keys.shape[:2], device=seen.keys.device)

        cache = kvkeep.Cache(self.model, Method("spy", spy, voters=voters), 1)
        self.model(ids[None].to(self.model.device), past_key_values=cache, logits_to_keep=1)
        return noted


def table(title: str, head: Iterable[str], rows: Iterable[Iterable]) -> str:
    lines = [f"\n## {title}\n", "| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * lines[-1].count(" | ") + "---|")
    for row in rows:
        cells = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def needles(lab: Lab) -> str:
    specs = [*kvkeep.methods, "snapkv+adakv", "intentkv+adakv", "snapkv+pyramid", "snapkv+cake", "snapkv+entropy"]
    budgets = (128, 256, 512)
    rows = [[spec, *(lab.found(spec, budget, 2000) for budget in budgets)] for spec in specs]
    return table("Needle in 2,000 tokens, by method and budget", ["method", *map(str, budgets)], rows)


def intent(lab: Lab) -> str:
    budgets = (256, 512)
    tries = [{"block": b} for b in (1, 4, 8, 16, 64, 256)] + [{"window": w} for w in (32, 128)]
    tries += [{"intention": False}, {"intention": False, "block": 1}, {"smooth": 1}, {"sinks": 4, "recent": 16}]
    name = lambda t: ", ".join(f"{k}={v}" for k, v in t.items())  # noqa: E731
    rows = [[name(t), *(lab.found("intentkv", budget, 2000, **t) for budget in budgets)] for t in tries]
    return table("IntentKV: block size and ablations (needle, 2,000 tokens)", ["change", *map(str, budgets)], rows)


def bias(lab: Lab) -> str:
    rows = []
    for spec, options in [
        ("h2o", {}),
        ("snapkv", {}),
        ("ahakv", {}),
        ("ahakv", {"step_gain": False}),
        ("ahakv", {"value_prior": False}),
    ]:
        middles, spreads = [], []
        for seed in range(lab.samples):
            ids = torch.tensor(lab.stretch(2000 + seed, 1500), device=lab.model.device)[None]
            cache = kvkeep.Cache(lab.model, spec, 256, **options)
            lab.model(ids, past_key_values=cache, logits_to_keep=1)
            recent = 128 if spec == "h2o" else 64 if spec == "snapkv" else 32
            far = [p for i in cache.owned for head in cache.kept(i)[0] for p in head[: 256 - recent]]
            middles.append(sum(far) / len(far) / 1500)
            counts = torch.histc(torch.tensor(far, dtype=torch.float), 20, 0, 1500)
            share = counts / counts.sum()
            spreads.append(float(-(share * share.clamp_min(1e-9).log()).sum() / math.log(20)))
        label = spec + (f" ({next(iter(options))}=False)" if options else "")
        rows.append([label, sum(middles) / len(middles), sum(spreads) / len(spreads)])
    head = ["method", "mean position / n of chosen (not recent) tokens", "entropy of their histogram / uniform"]
    return table("Position bias, 1,500 tokens of prose, budget 256", head, rows)


def tenth(attended: Tensor, degree: Tensor) -> float:
    """Of the attention these tokens get, the share of their tenth of highest degree; mean over key heads."""
    top = degree >= degree.quantile(0.9, dim=1, keepdim=True)
    return float(((attended * top).sum(1) / attended.sum(1)).mean())


def decode_shares(seen: Observation, context: int, ahead: int) -> list[float]:
    """What the last `ahead` queries, those of written tokens, give the context: of that, the parts asked about.

    The tenth of highest degree; the first 4; the tenth of highest degree among the others.
    """
    part = dict(keys=seen.keys[:, :context], positions=seen.positions[:, :context])
    degree = outlier_degree(replace(seen, **part, lengths=(context,) * seen.kv_heads), 5)
    attended = attention(seen, ahead).mean((1, 2))[:, :context]
    first = float((attended[:, :4].sum(1) / attended.sum(1)).mean())
    return [tenth(attended, degree), first, tenth(attended[:, 4:], degree[:, 4:])]


def outliers(lab: Lab) -> str:
    context, ahead, shares = 1500, 32, []
    for seed in range(lab.samples):
        ids = torch.tensor(lab.stretch(3000 + seed, context), device=lab.model.device)[None]
        written = lab.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ahead, min_new_tokens=ahead, do_sample=False
        )
        shares.append(lab.watch(lambda seen: decode_shares(seen, context, ahead), written[0], ahead))
    thirds = torch.tensor(shares).mean(0).chunk(3)  # [layers, 3] each
    asked = [
        "the 10 % of highest outlier degree",
        "the first 4 tokens",
        "without the first 4: the 10 % of highest outlier degree",
    ]
    text = table(
        f"Share of {ahead} written tokens' attention to a context of {context:,} tokens, by outlier degree",
        ["tokens of the context", "first layers", "middle layers", "last layers"],
        [[name, *(float(third[:, row].mean()) for third in thirds)] for row, name in enumerate(asked)],
    )

    def drop_outliers(seen, budget):
        return -outlier_degree(seen, 5)

    def drop_random(seen, budget):
        source = torch.Generator().manual_seed(seen.layer)
        return torch.rand(seen.keys.shape[:2], generator=source).to(seen.keys.device)

    guard = Guard(recent=32)
    rows = [["nothing", lab.surprise("full", 1500, 1500)]]
    rows.append(["10 % at random", lab.surprise(Method("random", drop_random, guard), 1350, 1500)])
    rows.append(["10 % of highest outlier degree", lab.surprise(Method("outliers", drop_outliers, guard), 1350, 1500)])
    rows.append(
        [
            "10 % of highest degree, but not the first 4",
            lab.surprise(Method("late", drop_outliers, Guard(4, 32)), 1350, 1500),
        ]
    )
    return text + table("Dropping tokens: mean loss of the next 100 tokens", ["dropped", "loss"], rows)


def hits(lab: Lab) -> str:
    asked = len(lab.tokenizer(QUESTION).input_ids) + 6  # and the template's tail

    def rates(ids: Tensor, where: int):
        def look(seen):
            rows = attention(seen, 2 * asked)
            found = []
            for part in (rows[:, :, :asked], rows[:, :, asked:]):
                score = part.mean(2).flatten(0, 1)[:, : len(ids) - 2 * asked]
                blocks = torch.nn.functional.pad(score, (0, -score.shape[1] % 64)).view(len(score), -1, 64).sum(-1)
                found.append(
                    float((blocks.topk(min(10, blocks.shape[1])).indices == where // 64).any(1).float().mean())
                )
            return found

        return torch.tensor(lab.watch(look, ids, 2 * asked)).mean(0)

    total = torch.zeros(2)
    for seed in range(lab.samples):
        ids, number = lab.needle(seed, 2000)
        text = lab.tokenizer.decode(ids)
        total += rates(ids, len(lab.tokenizer(text[: text.index(number)], add_special_tokens=False).input_ids))
    blocks = 2000 // 64
    head = ["text before the question", "the question", f"chance (10 of {blocks} blocks)"]
    return table("How often the answer's block is among the 10 best of 64 tokens (mean over layers and heads)", head,
                 [[*(total / lab.samples).tolist(), 10 / blocks]])  # fmt: skip


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


EXPERIMENTS = {f.__name__: f for f in (needles, intent, bias, outliers, hits, intel)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--haystack", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--model", default=None)
    parser.add_argument("--only", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hush()
    model, tokenizer = load(options.model, dtype="float32")
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
