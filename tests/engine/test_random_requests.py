"""Three threads, 200 random requests of one scheduler: each says what it says alone, whatever becomes of the others."""

import random
import threading
from dataclasses import dataclass, field
from functools import cache

import pytest
import tiny_chat
import torch
from test_scheduler import assert_free

from kvkeep.compress.parse import parse
from kvkeep.engine.batch import DecodeBatch
from kvkeep.engine.driver import Driver, Handle
from kvkeep.engine.packed_forward import PackedForward
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation, SamplingRows
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadInput

REQUESTS, THREADS, LONGEST = 200, 3, 8
WORDS = tiny_chat.tokenizer()
LENGTHS = [1, 5, 60, 200, 400] * 10 + [1000] * 2 + [3000]
TOO_LONG = 4100  # for methods that do not extend the context length of 4,096
METHODS = [  # method, budget, options of its cache
    *(("snapkv", budget, {}) for budget in (40, 0.3)),
    *((spec, 64, {}) for spec in ("kvkeep", "full", "cake", "chunkkv", "protokv", "intelllm", "snapkv+adakv")),
    *((spec, 48, {}) for spec in ("h2o", "tova", "streamingllm", "ahakv")),
    ("snapkv", 50, {"schedule": 4}),
    *((spec, 96, {}) for spec in ("actqkv", "infllm", "tokenselect", "emllm", "quest", "clusterkv", "sentencekv")),
    *((spec, 64, {"storage": storage}) for spec, storage in (("kvkeep", "int8"), ("full", "int8"), ("snapkv", "int4"))),
]
FATES = ["answered"] * 14 + ["cancelled at once", "cancelled later", "callback", "too long", "memory"]


@dataclass(frozen=True)
class Job:
    """One request, and what is to become of it."""

    method: int  # of METHODS
    length: int
    text: int  # which of the texts of this length
    how: Generation = field(hash=False, compare=False)
    interactive: bool
    fate: str

    @classmethod
    def draw(cls, luck: random.Random) -> "Job":
        warm = luck.choice([{}, {}, {"temperature": 1.0, "seed": luck.randint(0, 1)}])
        how = Generation(luck.randint(1, LONGEST), **warm)
        where = luck.randrange(len(METHODS)), luck.choice(LENGTHS), luck.randint(0, 1)
        return cls(*where, how, luck.random() < 0.7, luck.choice(FATES))


@pytest.fixture(scope="module")
def configs():
    """Of METHODS, all of one model. In float64 a batch rounds too little to change what is kept."""
    model = tiny_chat.model(window=4096).double()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 5
    return [SequenceConfig(model, WORDS, parse(spec), budget, cache_options=how) for spec, budget, how in METHODS]


@cache
def text(length, number):
    return torch.randint(5, 120, (length,), generator=torch.Generator().manual_seed(length + number))


def alone(config, ids, how):
    """The answer of model and cache, without a scheduler."""
    sequence, written = config.new_sequence(), []
    logits = sequence.prefill(ids)
    for position in range(len(ids), len(ids) + LONGEST):
        row = SamplingRows.of([how], logits.device)
        written.append(int(row.sample(logits[None], torch.tensor([position]))))
        logits = sequence.extend(torch.tensor(written[-1:]))[-1]
    return written


def lacks_memory(monkeypatch, doomed):
    """A prefill of these requests runs out of memory, always; every twentieth decode step of several rows does, too."""
    forward = PackedForward.__call__

    def prefill(self, chunks, *how):
        if any(sequence in [each._sequence for each in doomed] for sequence, _ in chunks):
            raise torch.OutOfMemoryError("simulated, in a prefill")
        return forward(self, chunks, *how)

    monkeypatch.setattr(PackedForward, "__call__", prefill)
    for kind in (PooledBatch, DecodeBatch):

        def launch(self, launch=kind.launch, steps=[0]):  # noqa: B006
            steps[0] += len(self.requests) > 1
            if len(self.requests) > 1 and steps[0] % 20 == 0:
                raise torch.OutOfMemoryError("simulated, in decode")
            launch(self)

        monkeypatch.setattr(kind, "launch", launch)


def fail(*_):
    raise ZeroDivisionError("in a callback")


def submit(job, driver, configs, doomed):
    length = TOO_LONG if job.fate == "too long" else job.length
    request = Request(configs[job.method], text(length, job.text), job.how, interactive=job.interactive)
    if job.fate == "callback":
        request.progress = fail
    if job.fate == "memory":
        doomed.append(request)
    return Handle(driver.submit(request), driver)


def follow(job, driver, configs, doomed):
    """Submit it, and see that it ends as it has to. -> its tokens, if it was answered; else nothing of it is left"""
    try:
        handle = submit(job, driver, configs, doomed)
    except BadInput:
        assert job.fate == "too long" and not configs[job.method].method.extends_context
        return None
    if job.fate == "cancelled later":
        next(iter(handle), None)  # left early: that cancels
    elif job.fate == "cancelled at once":
        handle.cancel()
    elif job.fate in ("callback", "memory"):
        with pytest.raises(ZeroDivisionError if job.fate == "callback" else torch.OutOfMemoryError):
            handle.result()
    else:
        handle.result()
        return handle.request.answer.ids
    assert handle.done
    with driver.lock:
        assert handle.request not in driver.scheduler.held.requests and handle.request._sequence is None
    return None


@pytest.mark.core
@pytest.mark.slow
def test_every_request_says_what_it_says_alone(configs, monkeypatch):
    luck, found, doomed, errors = random.Random(1), {}, [], []
    jobs = [Job.draw(luck) for _ in range(REQUESTS)]
    driver = Driver(Scheduler(configs[0].model, set(), max_rows=6))
    lacks_memory(monkeypatch, doomed)

    def work(mine):
        try:
            for number in mine:
                found[number] = follow(jobs[number], driver, configs, doomed)
        except BaseException as error:  # noqa: BLE001
            errors.append((number, jobs[number], error))

    threads = [threading.Thread(target=work, args=(range(first, REQUESTS, THREADS),)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert not errors, errors
    with driver.lock:  # the last answer is there before its step is over
        assert len(found) == REQUESTS and not driver.scheduler.held.num_requests
        assert_free(driver.scheduler)
    solo = {}
    for number, written in found.items():
        job = jobs[number]
        if written is not None:
            ids = text(TOO_LONG if job.fate == "too long" else job.length, job.text)
            key = job.method, len(ids), job.text, job.how.temperature, job.how.seed
            if key not in solo:
                solo[key] = alone(configs[job.method], ids, job.how)
            assert written == solo[key][: job.how.max_new_tokens], (number, METHODS[job.method], job)
    assert {fate: sum(job.fate == fate for job in jobs) > 5 for fate in FATES} == dict.fromkeys(FATES, True)
