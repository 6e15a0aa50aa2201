"""The same prompts through kvkeep and through kvpress: scores, answers, and the tokens each keeps.

    python benchmarks/kvpress_scores.py kvkeep --out DIR --haystack DIR [--length 2048] [--limit 3]
    python benchmarks/kvpress_scores.py kvpress --out DIR        # in an environment of its own
    python benchmarks/kvpress_scores.py compare --out DIR        # in kvkeep's, prints Markdown
    python benchmarks/kvpress_scores.py rules --out DIR          # in kvkeep's, with kvpress' rules where they differ

kvpress 0.5 wants transformers below 5.3 and kvkeep 5.10 or later (see kvpress_costs.py), so the first command leaves
token ids for the second. One prefill serves all methods on both sides; what is kept is chosen by kvpress' own presses
and answered through its own pipeline. A run that was cut short goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

EXPECTED, ADAPTIVE = "expected_attention", "expected_attention:epsilon=0.02+adakv"
METHODS = "snapkv", EXPECTED, ADAPTIVE, "kvzip"
KEPT = 0.25, 0.125  # shares
TASKS = "niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"  # one number of seven digits each
NEW_TOKENS = 32
Masks = list[list[int]]  # of each layer and KV head: bit p is set if token p is kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("kvkeep", "kvpress", "compare", "rules"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--haystack", type=Path)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=3, help="samples of each task")
    parser.add_argument("--model", default=str(Path.home() / ".cache/kvkeep/models/smollm2-135m-instruct"))
    options = parser.parse_args()
    if options.what == "compare":
        return compare(options.out)
    if options.what == "rules":
        return by_their_rules(options)
    options.out.mkdir(parents=True, exist_ok=True)
    answered = by_kvkeep(options) if options.what == "kvkeep" else by_kvpress(options)
    path = options.out / f"{options.what}.jsonl"
    for prompt, answers in answered:
        with path.open("a") as file:
            file.write(json.dumps({"prompt": prompt, "answers": answers}) + "\n")
        print(prompt, {name: each["answer"][:24] for name, each in answers.items()}, flush=True)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def facts(answer: str, kept: Masks) -> dict[str, Any]:
    return {"answer": answer, "kept": [[f"{head:x}" for head in layer] for layer in kept]}


def mask(positions: Sequence[int]) -> int:
    return sum(1 << position for position in positions)


# kvkeep's environment


def by_kvkeep(options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Answers prompt by prompt; their ids are left in prompts.jsonl."""
    from dataclasses import replace

    from kvkeep.evaluate import suite
    from kvkeep.evaluate.item import Item
    from kvkeep.evaluate.prompt import PROTOCOLS, build_prompt
    from kvkeep.evaluate.worker import Worker
    from kvkeep.model.load import load, quiet_transformers

    quiet_transformers()
    model, tokenizer = load(options.model)
    sources = suite.Sources(haystack=options.haystack, lengths=(options.length,), limit=options.limit)
    samples, _ = suite.load(TASKS, tokenizer, sources)
    samples = [replace(each, max_new_tokens=NEW_TOKENS) for each in samples]
    samples.sort(key=lambda each: int(each.id.rpartition("-")[2]))  # a run cut short has as many of each task
    configs = [("full", None), *product(METHODS, KEPT)]

    class Watched(Worker):
        def _prefill(self, *args: Any) -> Any:
            contexts = super()._prefill(*args)
            kept.extend([[mask(head) for head in c.sequence.cache.kept(i)[0]] for i in layers] for c in contexts)
            return contexts

    layers = range(model.config.num_hidden_layers)
    kept: list[Masks] = []
    worker = Watched(model, tokenizer, configs)
    asked = list(product(samples, PROTOCOLS))
    prompts = [_prompt(protocol, sample, build_prompt(tokenizer, sample, protocol, 8192)) for sample, protocol in asked]
    (options.out / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    done = len(rows(options.out / "kvkeep.jsonl"))
    for (sample, protocol), prompt in list(zip(asked, prompts, strict=True))[done:]:
        kept.clear()
        found = [row for row, _ in worker(Item(protocol, (sample,)))]
        answers = {_config(r["method"], r["budget"]): facts(r["answer"], k) for r, k in zip(found, kept, strict=True)}
        yield prompt["prompt"], answers


def _prompt(protocol: str, sample: Any, ids: Any) -> dict[str, Any]:
    about = {"prompt": f"{sample.task}/{sample.id}/{protocol}", "metric": sample.metric}
    texts = {"text": sample.context, "asked": sample.question, "prefix": sample.prefix, "references": sample.references}
    return {**about, **texts, "context": ids.context.tolist(), "question": ids.question.tolist()}


def _config(method: str, share: float | None) -> str:
    return method if share is None else f"{method} {share:g}"


# kvpress' environment


def by_kvpress(options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Answers to the prompts that kvkeep left."""
    from kvpress import AdaKVPress, ExpectedAttentionPress, KVzipPress, SnapKVPress
    from kvpress.presses.base_press import BasePress
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    layers = [layer.self_attn for layer in model.model.layers]
    makes = {
        "snapkv": SnapKVPress,
        EXPECTED: ExpectedAttentionPress,
        ADAPTIVE: lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio, epsilon=0.02)),
    }
    found: dict[str, list[tuple]] = {}  # of each config and layer: keys, values, hidden ones, what is kept

    class Together(BasePress):
        """Each press scores a layer once, and chooses from it at every ratio; the prefill goes on with all."""

        def compress(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            found.setdefault("full", []).append((keys, values, None, everything(keys)))
            places = torch.arange(keys.shape[2], dtype=torch.float64)[None, None, :, None].expand(keys.shape)
            for name, make in makes.items():
                scorer = getattr(make(0.0), "press", make(0.0))
                scores = scorer.score(module, hidden, keys, values, attentions, kwargs)
                for share in KEPT:
                    press = make(1 - share)
                    getattr(press, "press", press).score = lambda *_, scores=scores: scores.clone()
                    chosen = press.compress(module, hidden, keys, values, attentions, kwargs)
                    where = press.compress(module, hidden, places, places, attentions, kwargs)[0][0, :, :, 0]
                    hidden_ones = getattr(module, "masked_key_indices", None)
                    module.masked_key_indices = None
                    kept = unmasked(keys, hidden_ones) if hidden_ones else [mask(head) for head in where.int().tolist()]
                    found.setdefault(_config(name, share), []).append((*chosen, hidden_ones, kept))
            return keys, values

    class KVzipAtEachRatio(KVzipPress):
        def compress_post(self, model: Any) -> None:
            for share in KEPT:
                self.compression_ratio = 1 - share
                super().compress_post(model)
                for module, (keys, values, *_) in zip(layers, found["full"], strict=True):
                    hidden_ones, module.masked_key_indices = module.masked_key_indices, None
                    row = keys, values, hidden_ones, unmasked(keys, hidden_ones)
                    found.setdefault(_config("kvzip", share), []).append(row)

    def answer(kept: list[tuple], prompt: dict[str, Any], first: int) -> str:
        """From what a press left, of the question or, where it was compressed, too, of the answer's first token on."""
        cache = DynamicCache()
        for i, (module, (keys, values, hidden_ones, _)) in enumerate(zip(layers, kept, strict=True)):
            cache.update(keys, values, i)
            module.masked_key_indices = hidden_ones
        asked, length = prompt["question"], len(prompt["context"])
        if not asked and first == model.generation_config.eos_token_id:
            return ""
        text = pipe.generate_answer(torch.tensor([asked or [first]]), cache, length, NEW_TOKENS - (not asked))
        for module in layers:
            module.masked_key_indices = None
        return text if asked else tokenizer.decode([first]) + text

    done = len(rows(options.out / "kvpress.jsonl"))
    for prompt in rows(options.out / "prompts.jsonl")[done:]:
        found.clear()
        with torch.inference_mode():
            cache = DynamicCache()
            with KVzipAtEachRatio(0.5)(model), Together()(model):
                logits = model(torch.tensor([prompt["context"]]), past_key_values=cache, logits_to_keep=1).logits
            first = int(logits[0, -1].argmax())
            answers = {name: answer(kept, prompt, first) for name, kept in found.items()}
        yield prompt["prompt"], {name: facts(answers[name], [layer[3] for layer in found[name]]) for name in found}


def everything(keys: torch.Tensor) -> list[int]:
    return [(1 << keys.shape[2]) - 1] * keys.shape[1]


def unmasked(keys: torch.Tensor, hidden_ones: tuple) -> list[int]:
    """What is left of each head after masking (row, head, position)."""
    kept = torch.ones(keys.shape[1:3], dtype=torch.bool)
    kept[hidden_ones[1], hidden_ones[2]] = False
    return [mask(head.nonzero()[:, 0].tolist()) for head in kept]


# the comparison


def compare(out: Path) -> None:
    from kvkeep.evaluate.metrics import METRICS

    prompts = {each["prompt"]: each for each in rows(out / "prompts.jsonl")}
    ours, theirs = ({row["prompt"]: row["answers"] for row in rows(out / f"kv{by}.jsonl")} for by in ("keep", "press"))
    both = [name for name in ours if name in theirs]

    def score(name: str, answer: str) -> float:
        return METRICS[prompts[name]["metric"]](answer, prompts[name]["references"])

    print("| question | method, share kept | n | kvkeep | kvpress | difference (95 %) | same answer | kept in common |")
    print("|---|---|---|---|---|---|---|---|")
    for (protocol, asked), config in product((("agnostic", "unknown"), ("aware", "known")), ours[both[0]]):
        if not (names := [name for name in both if name.endswith(protocol)]):
            continue
        pairs = [(ours[name][config], theirs[name][config]) for name in names]
        scores = [[score(name, each["answer"]) for each in pair] for name, pair in zip(names, pairs, strict=True)]
        first, second = (mean(column) for column in zip(*scores, strict=True))
        wide = 1.96 * stdev(a - b for a, b in scores) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
        same = sum(a["answer"].strip() == b["answer"].strip() for a, b in pairs)
        common = [jaccard(*heads) for a, b in pairs for heads in zip(flat(a), flat(b), strict=True)]
        print(
            f"| {asked} | {config} | {len(names)} | {first:.1f} | {second:.1f} "
            f"| {first - second:+.1f} ± {wide:.1f} | {same} | {mean(common):.4f}, least {min(common):.3f} |"
        )


def by_their_rules(options: Any) -> None:
    """What kvkeep keeps where it follows kvpress in the three rules they differ by: the same, but for rounding."""
    from dataclasses import replace
    from unittest.mock import patch

    from torch.nn.functional import avg_pool1d, pad

    import kvkeep
    from kvkeep.compress.budget.heads import AdaptiveHeads
    from kvkeep.compress.scorers import window
    from kvkeep.compress.scorers.repetition import Replay
    from kvkeep.evaluate.prefill import prefill_shared
    from kvkeep.model.chat import start_of_message
    from kvkeep.model.load import load, quiet_transformers

    def pool(scores: Any, among: Any, width: int, _: str) -> Any:
        """Averages at the ends count zeros beyond them."""
        return torch.where(among, avg_pool1d(scores * among, width, 1, width // 2), scores)

    def sure(self: AdaptiveHeads, forced: Any, budget: int) -> Any:
        """A head's floor is a share of its budget, forced tokens included."""
        return forced.sum(1, dtype=torch.float64).clamp_min(int(self.alpha * budget))

    def score(self: Replay, seen: Any) -> Any:
        """The template's beginning takes no part in the softmax, but for the first 4 tokens, and is evicted first."""
        if seen.sinks.shape[1]:
            return own_score(self, seen)
        text = replace(seen, sinks=seen.keys[:, :4], keys=seen.keys[:, begun:], values=seen.values[:, begun:])
        return pad(own_score(self, text), (begun, 0), value=1e-35)

    quiet_transformers()
    model, tokenizer = load(options.model)
    own_score, begun, layers = Replay.score, len(start_of_message(tokenizer)), range(model.config.num_hidden_layers)
    prompts = {each["prompt"]: each for each in rows(options.out / "prompts.jsonl")}
    print("| prompt | method, share kept | kept by kvkeep | by kvpress | by one alone |\n|---|---|---|---|---|")
    for row in rows(options.out / "kvpress.jsonl")[: options.limit]:
        caches = {(m, share): kvkeep.Cache(model, m, share, tokenizer=tokenizer) for m, share in product(METHODS, KEPT)}
        ids = torch.tensor([prompts[row["prompt"]]["context"]])
        rules = patch.object(AdaptiveHeads, "sure", sure), patch.object(Replay, "score", score)
        with patch.object(window, "pool", pool), rules[0], rules[1]:
            prefill_shared(model, ids, list(caches.values()))
        for config, cache in caches.items():
            ours, theirs = (
                [mask(head) for i in layers for head in cache.kept(i)[0]],
                flat(row["answers"][_config(*config)]),
            )
            alone = sum((a ^ b).bit_count() for a, b in zip(ours, theirs, strict=True))
            counts = [sum(head.bit_count() for head in each) for each in (ours, theirs)]
            print(f"| {row['prompt']} | {_config(*config)} | {counts[0]} | {counts[1]} | {alone} |", flush=True)


def flat(facts: dict[str, Any]) -> list[int]:
    return [int(head, 16) for layer in facts["kept"] for head in layer]


def jaccard(one: int, other: int) -> float:
    return (one & other).bit_count() / (one | other).bit_count() if one | other else 1.0


if __name__ == "__main__":
    main()
