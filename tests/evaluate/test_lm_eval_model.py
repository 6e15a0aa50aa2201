"""kvkeep as a model of lm-eval: nothing dropped is lm-eval's own model, and what is dropped is really missing."""

import importlib
import json
import sys

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.errors import BadInput, BadParameter, MissingExtra, UnknownName

pytest.importorskip("lm_eval", reason="needs kvkeep[harness]")
pytest.importorskip("accelerate", reason="needs kvkeep[harness]")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from kvkeep.evaluate import lm_eval_model
from kvkeep.evaluate.lm_eval_model import HFLM, KvkeepLM  # noqa: E402

TEXT = "".join(chr(97 + i * i % 23) for i in range(300))
PAIRS = [
    (TEXT, " yes"),
    (TEXT, " no, never"),
    (TEXT + "  ", "blanks belong to what follows"),
    (TEXT, "!"),
    (TEXT[:9], " short"),
    ("", "nothing before"),
    (TEXT * 4, " too long"),
]


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.model(), tiny_chat.tokenizer()


def ours(chat, method="full", budget=None, **options):
    return KvkeepLM(chat[0], method, budget, tokenizer=chat[1], **options)


def stock(chat, **options):
    """lm-eval's own model, with the same weights in a model no cache of ours has touched."""
    return HFLM(tiny_chat.model(), tokenizer=chat[1], **options)


def asked(kind, *arguments):
    return [Instance(kind, {}, each, 0) for each in arguments]


def scores(lm, pairs=PAIRS):
    found = lm.loglikelihood(asked("loglikelihood", *pairs))
    return [score for score, _ in found], [greedy for _, greedy in found]


def step_by_step(chat, method, budget, context, ids, **parameters):
    """The same number by another way: a cache of our own, one token at a time."""
    model = chat[0]
    cache = kvkeep.Cache(model, method, budget, **parameters)
    logits = model(torch.tensor([context]), past_key_values=cache).logits[0, -1]
    total = 0.0
    for token in ids:
        total += float(logits.log_softmax(-1)[token])
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return total


@pytest.mark.parametrize("max_length", [None, 64])
def test_with_everything_kept_it_is_lm_evals_own_model(chat, max_length):
    want = scores(stock(chat, max_length=max_length))
    found = scores(ours(chat, max_length=max_length))
    assert found[0] == pytest.approx(want[0], abs=1e-4) and found[1] == want[1]


def test_what_greedy_decoding_would_write_is_known(chat):
    ids = chat[1](TEXT, return_tensors="pt").input_ids
    likely = chat[0].generate(ids, max_new_tokens=3, do_sample=False)[0, 300:].tolist()
    requests = [(None, ids[0].tolist(), likely), (None, ids[0].tolist(), [*likely[:2], likely[2] ^ 1])]
    for lm in (stock(chat), ours(chat)):
        assert [greedy for _, greedy in lm._loglikelihood_tokens(requests)] == [True, False]


@pytest.mark.parametrize("method", EVICTING)
def test_room_for_everything_changes_nothing(chat, method):
    budget = None if method == "full" else 4000
    want = scores(stock(chat), PAIRS[:3])[0]
    assert scores(ours(chat, method, budget), PAIRS[:3])[0] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("budget", [16, 0.1])
def test_scores_come_from_what_was_kept(chat, budget):
    full, found = scores(ours(chat))[0], scores(ours(chat, "snapkv", budget, window=4))[0]
    for (context, text), all_kept, some_kept in zip(PAIRS[:3], full, found, strict=False):
        read = context.rstrip()
        ids = chat[1](context + text).input_ids[len(read) :]
        context_ids = chat[1](read).input_ids
        want = step_by_step(chat, "snapkv", budget, context_ids, ids, window=4)
        assert some_kept == pytest.approx(want, abs=1e-4) and abs(some_kept - all_kept) > 1e-3


@pytest.mark.parametrize("spec", [name for name in RETRIEVING if not parse(name).retrieval.needs])
def test_a_continuation_is_fetched_for_as_if_it_were_written(spec):
    """Read at once, it would be seen by methods that read texts whole beside everything that was offloaded."""
    chat = tiny_chat.sharp()
    ids = chat[1](" no, never").input_ids
    (found,), _ = scores(ours(chat, spec, 32), PAIRS[1:2])
    assert found == pytest.approx(step_by_step(chat, spec, 32, chat[1](TEXT).input_ids, ids), abs=1e-4)
    (full,), _ = scores(ours(chat), PAIRS[1:2])
    assert abs(found - full) > 2e-4


def test_one_reading_serves_every_continuation(chat, monkeypatch):
    lm, read = ours(chat, "snapkv", 16), []
    forward = lm._forward
    monkeypatch.setattr(lm, "_forward", lambda cache, ids, last=0: read.append(len(ids)) or forward(cache, ids, last))
    apart = [scores(lm, [pair])[0][0] for pair in PAIRS]
    read.clear()
    mixed = [PAIRS[i] for i in (3, 0, 5, 2, 4, 6, 1)]
    together = dict(zip(mixed, scores(lm, mixed)[0], strict=True))
    assert read.count(300) == 1
    assert [together[pair] for pair in PAIRS] == apart


def test_one_token_is_predicted_before_anything_is_dropped_and_that_is_said(chat, caplog):
    assert scores(ours(chat), [(TEXT, "!")]) == scores(ours(chat, "snapkv", 16), [(TEXT, "!")])
    assert "1 of 1 continuations are one token long" in caplog.text
    caplog.clear()
    scores(ours(chat), PAIRS)
    assert "one token" not in caplog.text and "context tokens are left out" in caplog.text


def test_whole_texts_have_nothing_to_compress(chat):
    texts = asked("loglikelihood_rolling", (TEXT * 5,), ("short",))
    want = stock(chat).loglikelihood_rolling(texts)
    assert ours(chat).loglikelihood_rolling(texts) == pytest.approx(want, rel=1e-5)
    with pytest.raises(BadParameter, match="'snapkv' would be given the perplexity of the full model"):
        ours(chat, "snapkv", 16).loglikelihood_rolling(texts)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_answers_are_written_from_what_was_kept(chat, batch_size):
    model, words = chat
    wanted = {"until": [], "max_gen_toks": 8, "do_sample": False}
    requests = asked("generate_until", (TEXT, wanted), (TEXT[:50], wanted))
    full = ours(chat, batch_size=batch_size).generate_until(requests)
    assert full == stock(chat).generate_until(requests)
    found = ours(chat, "snapkv", 16, window=4, batch_size=batch_size).generate_until(requests)
    for text, answer in zip((TEXT, TEXT[:50]), found, strict=True):
        ids, cache = words(text, return_tensors="pt").input_ids, kvkeep.Cache(model, "snapkv", 16, window=4)
        written = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
        assert answer == words.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert found != full
    stop = full[0][1]
    (cut,) = ours(chat).generate_until(asked("generate_until", (TEXT, {**wanted, "until": [stop]})))
    assert cut == full[0].split(stop)[0]


def test_sampling_is_as_the_task_says(chat):
    wanted = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    found = []
    for lm in (stock(chat), ours(chat), ours(chat)):
        torch.manual_seed(len(found) == 2)
        found += lm.generate_until(asked("generate_until", (TEXT, wanted)))
    assert found[0] == found[1] != found[2]


def test_the_chat_template_is_the_tokenizers(chat):
    lm = ours(chat)
    assert lm.apply_chat_template([{"role": "user", "content": "Hello"}]) == "<s>Hello</s><s>"
    assert lm.chat_template(True) == tiny_chat.TEMPLATE and isinstance(lm.tokenizer_name, str)


def test_what_cannot_be_is_refused_before_anything_is_read(chat):
    with pytest.raises(UnknownName, match="snapkw"):
        ours(chat, "snapkw", 16)
    with pytest.raises(BadParameter, match="needs a budget"):
        ours(chat, "snapkv")
    with pytest.raises(BadParameter, match="has no parameter 'widow'"):
        ours(chat, "snapkv", 16, widow=4)
    with pytest.raises(BadInput, match="has 30 tokens; 1 to 16 can be scored"):
        scores(ours(chat, max_length=16), [("a", "b" * 30)])


TASK = """task: toy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["yes", "never"]
doc_to_target: gold
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_makes_it_by_name(chat, tmp_path):
    for part in chat:
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps({"text": TEXT[i:], "gold": i}) + "\n" for i in (0, 1)))
    (tmp_path / "tasks" / "toy.yaml").write_text(TASK.format(file=tmp_path / "toy.jsonl", cache=tmp_path / "cache"))
    results = simple_evaluate(
        "kvkeep",
        model_args=f"pretrained={tmp_path / 'model'},method=snapkv,budget=16,window=4",
        tasks=["toy"],
        device="cpu",
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    first = min(results["samples"]["toy"], key=lambda one: one["doc_id"])
    want = scores(ours(chat, "snapkv", 16, window=4), [(TEXT, " yes"), (TEXT, " never")])[0]
    assert [score for score, _ in first["filtered_resps"]] == pytest.approx(want, abs=1e-4)


def test_its_command_line_is_lm_evals(monkeypatch):
    asked_for = []

    def fetched(name, *, device, dtype):
        asked_for.append((name, device, dtype))
        return tiny_chat.model(), tiny_chat.tokenizer()

    monkeypatch.setattr(lm_eval_model, "load", fetched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: get_model("kvkeep")(method="snapkv", device="cuda:0"))
    with pytest.raises(SystemExit, match="error: 'snapkv' needs a budget"):
        lm_eval_model.main()
    assert asked_for == [("default", None, None)]  # cuda:0 is lm-eval's word for "not said"


def test_without_lm_eval_the_way_to_it_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvkeep.evaluate.lm_eval_model")
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvkeep\[harness\]'"):
        importlib.import_module("kvkeep.evaluate.lm_eval_model")
