"""A server of a tiny random model: a process of its own, or a thread of this one whose engine can be looked at."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

import tiny_chat

import kvkeep

KEY = "sk-of-the-tests"
TEMPLATE = (
    "{% if tools %}<s>{{ tools | tojson }} Say <tool_call>.</s>{% endif %}{% for m in messages %}<s>{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>AI: {% endif %}"
)
WINDOW = 4096


def model():
    """Bytes are tokens, so that any text, and any JSON, can be an answer."""
    made = tiny_chat.model(WINDOW)
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    return made, tiny_chat.tokenizer(TEMPLATE)


def engine(method="kvkeep", budget=64, **options):
    return kvkeep.Engine(*model(), method, budget, **options)


def wait_until(true, seconds=30.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def is_up(url):
    try:
        with urllib.request.urlopen(f"{url}/health") as reply:
            return json.load(reply)["status"] == "ok"
    except OSError:
        return False


@contextmanager
def process(folder, *options, double=False, env=(), **popen):
    """`kvkeep serve` of this model, named tiny; double: in float64. Gives the process, with its `url`."""
    made, tokenizer = model()
    (made.double() if double else made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = [sys.executable, "-m", "kvkeep", "serve", "--model", folder, "--name", "tiny", "--budget", "64"]
    command += ["--no-access-log"]  # nobody reads it here
    how = {"stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "OMP_NUM_THREADS": "1", **dict(env)}}
    started = subprocess.Popen([*map(str, command), "--port", "0", *options], **how, **popen)
    try:
        started.said = []
        for line in started.stderr:
            started.said.append(line)
            if " at http" in line:
                break
        assert started.said and " at http" in started.said[-1], "".join(started.said)
        started.url = started.said[-1].split(" at ")[1].strip().removesuffix("/v1")
        wait_until(lambda: is_up(started.url))
        yield started
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
        started.stderr.close()


@contextmanager
def thread(engine, keys=(), connections="auto", **limits):
    """The same in a thread; connections: uvicorn's protocol. Gives its `Server`, with its `url`."""
    import uvicorn

    from kvkeep.cli.serve import bind
    from kvkeep.serve.access import Keys, Limits
    from kvkeep.serve.routes import create_app
    from kvkeep.serve.server import Server

    served = Server(engine, "tiny", Keys(keys), Limits(**limits))
    listening = bind("127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(create_app(served), http=connections, log_level="error", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    one = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    one.start()
    try:
        wait_until(lambda: is_up(served.url))
        yield served
    finally:
        running.should_exit = True
        one.join()
        listening.close()


def client(served, key=KEY, **options):
    import openai

    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=60, **options)
