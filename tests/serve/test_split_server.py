"""`kvkeep serve --tensor-parallel 2`: two processes with a KV head each answer as one with both.

The model computes in float64: the processes add up in another order, and a rounding must not change an answer.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from importlib.util import find_spec

import openai
import psutil
import pytest
import serving
import torch
from serving import wait_until

from kvkeep.errors import BadParameter, UnsupportedModel

pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="heads are split by DTensor in transformers 5.17"
)
pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.xdist_group("split server"),
]
SPLIT = "--tensor-parallel", "2", "--device", "cpu", "--dtype", "auto", "--memory", "2MB", "--prefix-cache", "600kB"
TEXT = "The keeper of the lighthouse counted geese over the calm grey sea. " * 8
COLD = {"model": "tiny", "temperature": 0, "max_tokens": 12}
WARM = {"model": "tiny", "temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 12, "n": 2}
SCHEMA = {"type": "object", "properties": {"geese": {"type": "integer"}}, "required": ["geese"]}
JSON = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
METHODS = "kvkeep", "snapkv+adakv", "h2o", "quest", "streamingllm", "full"
ADAPTIVE = "kvkeep", "snapkv+adakv"  # one head may keep more than the other
LONG = COLD | {"max_tokens": 100}


def followers(served):
    return psutil.Process(served.pid).children(recursive=True)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """At the end, SIGTERM lets answers end, and both processes."""
    with serving.process(tmp_path_factory.mktemp("model"), *SPLIT, double=True) as served:
        yield served
        with serving.client(served) as api:
            whole = chat(api, "Go on.", **LONG).choices[0].message.content
            stream, (follower,) = chat(api, "Go on.", **LONG, stream=True), followers(served)
            text = next(stream).choices[0].delta.content
            served.terminate()
            follower.terminate()  # as a service manager does, to all of them
            text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole and served.wait(60) == 0
        assert psutil.wait_procs([follower], 60)[0] and served.stderr.read() == ""


@pytest.fixture(scope="module")
def api(split):
    with serving.client(split) as found:
        yield found


@pytest.fixture(scope="module")
def one():
    """A client of a server in one process."""
    engine = serving.engine(prefix_cache=10**9)
    engine.model.double()
    with serving.thread(engine) as served, serving.client(served) as found:
        yield found


def chat(api, text, method=None, **how):
    ours = {"extra_body": {"kvkeep": {"method": method}}} if method else {}
    return api.chat.completions.create(messages=[{"role": "user", "content": text}], **(COLD | ours | how))


def said(reply):
    return [choice.message.content for choice in reply.choices]


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_one_process(api, one, method):
    for how in (COLD | {"logprobs": True, "top_logprobs": 2}, WARM, COLD | {"response_format": JSON}):
        mine, other = (chat(each, TEXT, method, **how) for each in (api, one))
        assert said(mine) == said(other)
        share = mine.usage.kvkeep["kept_bytes"] / other.usage.kvkeep["kept_bytes"]
        assert 0.3 < share < 0.7 if method in ADAPTIVE else share == 0.5  # of the first process


@pytest.mark.slow
def test_clients_at_once_with_mixed_methods_have_their_own_answers(api, one):
    """More than fit into memory: they wait, and whoever leaves frees its row in both processes."""
    texts = {(method, number): f"{number} {TEXT[number:]}" for method in METHODS for number in range(3)}
    expected = {(method, number): said(chat(one, text, method)) for (method, number), text in texts.items()}
    got = {}

    def ask(name):
        if name[1] == 2:
            left = chat(api, texts[name], name[0], **LONG, stream=True)
            next(left)
            left.close()
        stream = chat(api, texts[name], name[0], stream=True)
        got[name] = ["".join(chunk.choices[0].delta.content or "" for chunk in stream)]

    threads = [threading.Thread(target=ask, args=(name,)) for name in texts]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert got == expected


def test_a_client_that_vanishes_frees_its_row(split, api):
    stream = chat(api, TEXT, **LONG, stream=True)
    next(stream)
    stream.close()
    wait_until(lambda: metric(split, "kvkeep_answers_running") == 0)
    assert said(chat(api, TEXT)) == said(chat(api, TEXT))


def metric(served, name):
    with urllib.request.urlopen(f"{served.url}/metrics") as reply:
        return next(float(line.split()[1]) for line in reply.read().decode().splitlines() if line.startswith(name))


def test_what_is_known_is_not_prefilled_again(api, one):
    talk = [{"role": "user", "content": f"Now: {TEXT}"}, {"role": "assistant", "content": "Geese."}]
    talk += [{"role": "user", "content": "How many?"}]
    first, again = (api.chat.completions.create(messages=talk[:end], **COLD) for end in (1, 3))
    assert again.usage.prompt_tokens_details.cached_tokens > len(TEXT) - 64
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert said(again) == said(one.chat.completions.create(messages=talk, **COLD))


@pytest.mark.parametrize("method", ["kvkeep", "compactor+adakv"])
def test_a_context_is_read_once_asked_about_and_removed(split, api, one, method):
    unnamed = api.post("/contexts", body={"model": "tiny", "text": TEXT}, cast_to=object)
    assert unnamed["kvkeep"]["method"] == "kvkeep" and api.delete(f"/contexts/{unnamed['id']}", cast_to=object)
    how = {"model": "tiny", "text": TEXT, "method": method}
    made = [each.post("/contexts", body=how, cast_to=object) for each in (api, one)]
    assert made[0]["tokens"] == made[1]["tokens"] and made[0]["bytes"] < made[1]["bytes"]
    about = [{"extra_body": {"kvkeep": {"context": each["id"]}}} for each in made]
    for question in ("How many geese?", "Who counted?"):
        mine, other = (chat(each, question, **how) for each, how in zip((api, one), about, strict=True))
        assert said(mine) == said(other)
        assert mine.usage.prompt_tokens_details.cached_tokens // 64 == made[0]["tokens"] // 64
    assert api.delete(f"/contexts/{made[0]['id']}", cast_to=object)["deleted"]
    with pytest.raises(openai.NotFoundError):
        chat(api, "How many geese?", **about[0])
    assert said(chat(api, TEXT)) == said(chat(one, TEXT))


@pytest.mark.parametrize("method", ["tokenselect", "kvzip", "snapkv+shared", "kvkeep_context"])
def test_a_method_that_needs_all_heads_is_refused_and_others_go_on(api, one, method):
    with pytest.raises(openai.BadRequestError, match="tensor parallelism splits"):
        chat(api, TEXT, method)
    with pytest.raises(openai.BadRequestError, match="tensor parallelism splits"):
        api.post("/contexts", body={"model": "tiny", "text": TEXT, "method": method}, cast_to=object)
    assert said(chat(api, "x" + TEXT)) == said(chat(one, "x" + TEXT))


def test_what_does_not_fit_is_refused_and_others_go_on(api, one):
    with pytest.raises(openai.BadRequestError, match="memory= is 2.0 MB; use a smaller budget"):
        chat(api, "x" * 3900, "full")
    assert said(chat(api, "x" + TEXT)) == said(chat(one, "x" + TEXT))


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_server_and_says_so(tmp_path):
    with serving.process(tmp_path, *SPLIT, double=True) as served, serving.client(served) as api:
        stream, (follower,) = chat(api, TEXT, **LONG, stream=True), followers(served)
        next(stream)
        follower.kill()
        assert served.wait(60) == 1
        said = served.stderr.read()
        assert "error: process 1 of 2 was killed by signal 9, and each has a part of the model. The server ends" in said
        assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in ("ray", "grpc", "mmh3")), reason="needs ray[serve]")
def test_a_replica_on_ray_is_split_the_same_way(tmp_path, one):
    with serving.process(tmp_path, *SPLIT, "--ray", double=True) as served, serving.client(served) as api:
        assert said(chat(api, TEXT)) == said(chat(one, TEXT))
        (follower,) = [each for each in followers(served) if "kvkeep.cli.follower" in each.cmdline()]
        served.terminate()
        assert served.wait(60) == 0 and psutil.wait_procs([follower], 60)[0]


def test_a_server_that_is_killed_leaves_no_process_behind():
    """A follower that waits for a word."""
    waiting = "import sys; from kvkeep.serve.followers import incoming; r = incoming(sys.stdin.buffer); print(r()); r()"
    code = (
        "import os, sys; from kvkeep.serve.followers import Followers\n"
        f"others = Followers([sys.executable, '-c', {waiting!r}], 2, print)\n"
        "others.send(b'x' * 3); print(*(each.pid for each in others.processes), flush=True); others.closing.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        found = [psutil.Process(int(each)) for each in server.stdout.readline().split()]
        assert len(found) == 2 and all(each.is_running() for each in found)
        os.kill(server.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(found, 60)
        assert not alive


def test_what_cannot_be_split_is_said_before_anything_is_loaded(tmp_path):
    from kvkeep.model.tensor_parallel import check_split

    made, tokenizer = serving.model()
    (tmp_path / "config.json").write_text(json.dumps(made.config.to_dict() | {"num_key_value_heads": 4}))
    assert check_split(str(tmp_path), 2, "cpu") == "cpu"
    with pytest.raises(UnsupportedModel, match="has 4 KV heads, which cannot be split over 3 processes; use 2 or 4"):
        check_split(str(tmp_path), 3, "cpu")
    with pytest.raises(BadParameter, match="takes the first 2 GPUs; use --device cpu"):
        check_split(str(tmp_path), 2, "cpu:0")
    command = [sys.executable, "-m", "kvkeep", "serve", "--tensor-parallel", "2", "--prefix-folder", str(tmp_path)]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True)
    assert done.returncode == 2 and "error: --prefix-folder saves whole caches" in done.stderr
