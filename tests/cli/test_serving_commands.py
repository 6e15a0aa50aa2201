"""`kvkeep serve` and `kvkeep chat`: what is checked before a model is loaded, and a conversation."""

import re
import socket

import pytest
import serving
from typer.testing import CliRunner

import kvkeep.cli.run
from kvkeep.cli import app
from kvkeep.cli.inputs import byte_count
from kvkeep.cli.serve import model_name
from kvkeep.errors import BadInput


def kvkeep_(*args, stdin=None):
    return CliRunner().invoke(app, [str(each) for each in args], input=stdin)


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(kvkeep.cli.run, "load", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(kvkeep.cli.run, "load", lambda *_, **__: serving.model())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "there are no API keys"),
        (["--host", "no.such.host.invalid"], "there are no API keys"),
        (["--keys", "nowhere.txt"], "'nowhere.txt' cannot be read"),
        (["--prefix-cache", "much"], "'much' is not a size"),
        (["--memory", "1XB"], "'1XB' is not a size"),
        (["--method", "snapvk"], "Did you mean 'snapkv'"),
        (["--replicas", "2"], "give --ray, too"),
        (["--autoscale", "max_replicas=3"], "give --ray, too"),
        (["--ray", "--autoscale", "max_replicas"], "give name=value"),
        (["--weights", "fp9"], "weights='fp9': use one of None, 'fp8', 'fp8+head'"),
        (["--weights", "fp8", "--tensor-parallel", "2"], "is for one process"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_a_model_is_loaded(no_model, options, said):
    done = kvkeep_("serve", *options)
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_said_at_once(no_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = kvkeep_("serve", "--port", taken.getsockname()[1])
    assert done.exit_code == 2 and "in use" in done.stderr


@pytest.mark.parametrize("options", [[], ["--allow-special-tokens"]])
def test_control_tokens_of_clients_are_the_operators_to_allow(tiny, monkeypatch, options):
    made = []
    monkeypatch.setattr("kvkeep.cli.serve._serve", lambda options, app, *_: made.append(app.state.server.engine))
    assert kvkeep_("serve", "--port", 0, "--budget", 64, *options).exit_code == 0
    assert [engine.config.allow_special_tokens for engine in made] == [bool(options)]


@pytest.mark.parametrize("options", [[], ["--weights", "fp8"]])
def test_weights_are_those_that_were_asked_for(tiny, monkeypatch, options):
    made = []
    monkeypatch.setattr("kvkeep.cli.serve._serve", lambda options, app, *_: made.append(app.state.server.engine))
    assert kvkeep_("serve", "--port", 0, "--budget", 64, *options).exit_code == 0
    assert [str(engine.model).count("Fp8Linear") > 0 for engine in made] == [bool(options)]


@pytest.mark.parametrize(("options", "seconds"), [([], None), (["--target-itl", 0.2], 0.2)])
def test_answers_get_tokens_as_often_as_was_asked_for(tiny, monkeypatch, options, seconds):
    made = []
    monkeypatch.setattr("kvkeep.cli.serve._serve", lambda options, app, *_: made.append(app.state.server.engine))
    assert kvkeep_("serve", "--port", 0, "--budget", 64, *options).exit_code == 0
    assert [engine._driver.scheduler.pace.target for engine in made] == [seconds]  # on a CPU nothing is usual


def test_clients_know_a_model_by_its_name(tmp_path):
    assert [model_name(each) for each in ("default", "Qwen/Qwen3-8B")] == ["smollm2-135m-instruct", "Qwen/Qwen3-8B"]
    (tmp_path / "mine").mkdir()
    assert model_name(str(tmp_path / "mine")) == "mine"


def test_the_extra_is_named_when_it_is_missing(no_model, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    done = kvkeep_("serve")
    assert done.exit_code == 2 and "needs uvicorn" in done.stderr and "kvkeep[serve]" in done.stderr


def test_keys_are_read_from_a_file_and_the_environment(tmp_path, monkeypatch):
    from kvkeep.serve.access import VARIABLE, Keys

    path = tmp_path / "keys"
    path.write_text("alice  # of Alice\n\n# nobody\nbob\n")
    monkeypatch.setenv(VARIABLE, "carol, dave")
    keys = Keys.load(str(path))
    owners = {keys.owner(secret) for secret in ("alice", "bob", "carol", "dave")}
    assert len(owners) == 4 and None not in owners and "" not in owners
    assert keys.owner("") is keys.owner("# nobody") is keys.owner("alice ") is None
    assert Keys().owner("anything") == ""
    path.write_text("# none\n")
    with pytest.raises(BadInput, match="no key"):
        Keys.load(str(path))


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GB", 40 * 10**9), ("1.5 kB", 1500), ("2GiB", 2 * 1024**3), ("7", 7), ("0", 0), ("3M", 3 * 10**6)],
)
def test_sizes(text, size):
    assert byte_count("--memory", text) == size


def test_a_conversation(tiny):
    said = "/help\nHello there.\n\nAnd again?\n/new\nHello there.\n/quit\nnever asked\n"
    done = kvkeep_("chat", "--budget", 64, "--max-new-tokens", 6, "--system", "Geese. " * 20, stdin=said)
    assert done.exit_code == 0, done.output
    assert "/help is no command; there are /new and /quit." in done.stderr
    answers = done.stderr.split("\n")[-4:-1]
    assert len([line for line in answers if line.startswith("[64 of ") and "tokens kept per KV head" in line]) == 3
    counts = r"of (\d+) tokens.*; (\d+) reused from earlier turns, (\d+) prefilled"
    numbers = [tuple(map(int, re.search(counts, line).groups())) for line in answers]
    first, second, again = (reused for _, reused, _ in numbers)
    assert first == 0 < second and again > 100  # the system's message was said before
    assert all(tokens == reused + prefilled for tokens, reused, prefilled in numbers)
    assert done.stdout.strip()


def test_a_conversation_that_is_exact(tiny):
    said = "Geese fly over the old lighthouse. " * 9 + "\nAnd again?\n"
    how = "chat", "--max-new-tokens", 8
    exact = kvkeep_(*how, "--budget", 32, "--exact", stdin=said)
    whole = kvkeep_(*how, "--method", "full", "--budget", 32, stdin=said)
    assert exact.stdout == whole.stdout != kvkeep_(*how, "--budget", 32, stdin=said).stdout
    passes = re.findall(r"8 generated; verified in \d+ passes; \d+ of \d+ guesses right]", exact.stderr)
    assert len(passes) == 2 and "verified" not in whole.stderr


def test_a_message_that_is_too_long_leaves_the_conversation_as_it_was(tiny):
    done = kvkeep_("chat", "--max-new-tokens", 6, stdin="x" * 5000 + "\nHello\n")
    assert done.exit_code == 0 and "context length is 4096" in done.stderr and "[12 of 12 tokens" in done.stderr
