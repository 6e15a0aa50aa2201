"""A server that is killed, whose disk is full, or that has no memory for a request."""

import resource
import threading
import time
import urllib.request

import openai
import pytest
import serving
import torch
from serving import wait_until

TEXT = "The keeper of the lighthouse counted geese over the calm grey sea. " * 12
COLD = {"model": "tiny", "temperature": 0, "max_tokens": 12}


def turns(number):
    """The history of a conversation, whose first part is stored."""
    texts = f"{number}: {TEXT}", "So they say.", "And then?"
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)]


def ask(api, number, **how):
    return api.chat.completions.create(messages=turns(number), **(COLD | how))


def metric(served, name):
    with urllib.request.urlopen(f"{served.url}/metrics") as reply:
        (line,) = [line for line in reply.read().decode().splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


@pytest.mark.slow
def test_a_store_is_whole_and_warm_after_kill_9_under_load(tmp_path):
    """Whatever was being written; answers are as before."""
    kept = tmp_path / "kept"
    options = ["--prefix-folder", str(kept), "--dtype", "auto"]

    def asks(api, number):
        with pytest.raises(openai.APIError):
            while True:
                ask(api, number)
                number += 100

    with serving.process(tmp_path, *options, double=True) as first, serving.client(first) as api:
        before = {number: ask(api, number).choices for number in range(3)}
        wait_until(lambda: len([*kept.rglob("*.kvblock")]) >= 12 * 3)
        clients = [threading.Thread(target=asks, args=(api, 1000 + number)) for number in range(4)]
        for client in clients:
            client.start()
        wait_until(lambda: len([*kept.rglob("*.kvblock")]) >= 12 * 8)
        first.kill()
        for client in clients:
            client.join()
    with serving.process(tmp_path, *options, double=True) as second, serving.client(second) as api:
        assert not [*kept.rglob(".*")]
        for number, choices in before.items():
            again = ask(api, number)
            assert again.usage.prompt_tokens_details.cached_tokens > len(TEXT) - 64
            assert again.choices == choices
        assert metric(second, "kvkeep_history_bytes") > 0
        second.kill()
        assert "damaged" not in "".join(second.said) + second.stderr.read()


def test_a_full_disk_costs_no_answer_and_is_said(tmp_path):
    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    kept = tmp_path / "kept"
    how = {"double": True, "preexec_fn": no_room}
    options = "--prefix-folder", str(kept), "--dtype", "auto"
    with serving.process(tmp_path, *options, **how) as served, serving.client(served) as api:
        assert [ask(api, number).choices for number in range(3)] == [ask(api, number).choices for number in range(3)]
        assert ask(api, 0).usage.prompt_tokens_details.cached_tokens > len(TEXT) - 64  # of memory
        wait_until(lambda: metric(served, "kvkeep_unsaved_blocks") > 0)
        served.kill()
        assert "could not be saved" in served.stderr.read() and not [*kept.rglob("*.kvblock"), *kept.rglob(".*")]


def test_out_of_memory_for_one_request_is_its_own(monkeypatch):
    """It is tried again when others are done, and then told; they do not notice."""
    engine = serving.engine()
    forward = engine._driver.scheduler.prefilling.forward
    too_much = torch.tensor(engine.tokenizer("#" * 20).input_ids[:20])

    def short_of_memory(chunks, *rest):
        if any(ids[n : n + 20].equal(too_much) for _, ids in chunks for n in range(40)):
            raise torch.OutOfMemoryError("CUDA out of memory: the secret prompt")
        return forward(chunks, *rest)

    short_of_memory.shares_forward, short_of_memory.compressed_layers = forward.shares_forward, ()
    with serving.thread(engine) as served, serving.client(served) as api:
        alone = [ask(api, number, max_tokens=80).choices for number in range(3)]
        monkeypatch.setattr(engine._driver.scheduler.prefilling, "forward", short_of_memory)
        streams = [ask(api, number, max_tokens=80, stream=True) for number in range(3)]
        with pytest.raises(openai.InternalServerError) as caught:
            api.completions.create(model="tiny", prompt="#" * 100, max_tokens=5)
        assert caught.value.status_code == 503 and caught.value.code == "out_of_memory"
        assert "secret" not in caught.value.response.text and "retry-after" in caught.value.response.headers
        texts = ["".join(each.choices[0].delta.content or "" for each in stream) for stream in streams]
        assert texts == [choices[0].message.content for choices in alone]
        assert ask(api, 0, max_tokens=80).choices == alone[0]


def test_what_could_not_be_saved_is_counted_while_nothing_is_stored():
    """Old: 0, because a store without prefixes is false."""
    from kvkeep.engine.store import Store
    from kvkeep.serve.metrics import Metrics

    store = Store(2**20)
    store.num_unsaved = 2
    assert "kvkeep_unsaved_prefixes 2.0" in Metrics([], store).page().decode()


def test_free_memory_is_returned_once_nobody_waits(monkeypatch):
    trims = []
    monkeypatch.setattr("kvkeep.serve.server.trim", lambda: trims.append(threading.current_thread()))
    monkeypatch.setattr("kvkeep.serve.server.IDLE_S", 0.2)
    long = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with serving.thread(serving.engine()) as served, serving.client(served) as api:
        stream = ask(api, 0, stream=True, **long)
        next(iter(stream))
        ask(api, 1)
        time.sleep(0.5)
        assert not trims and served.live  # somebody waits
        stream.close()
        wait_until(lambda: trims)
        time.sleep(0.5)
        assert len(trims) == 1 and trims[0] is not threading.main_thread()  # nor the one that serves
        for _ in range(3):
            ask(api, 1)
        wait_until(lambda: len(trims) == 2)


def test_requests_start_no_threads_that_stay():
    """Each thread may have a part of the C library's memory for itself."""
    with serving.thread(serving.engine()) as served, serving.client(served) as api:
        before = set(threading.enumerate())
        clients = [threading.Thread(target=ask, args=(api, number)) for number in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        for wrong in ({"model": "other"}, {"max_tokens": -1}):
            with pytest.raises(openai.APIStatusError):
                ask(api, 0, **wrong)
        wait_until(lambda: not served.engine._driver.thread)
        started = {thread.name for thread in set(threading.enumerate()) - before}
    assert started <= {"kvkeep-submit_0", "kvkeep-submit-long_0"}
