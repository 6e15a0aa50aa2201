"""`kvkeep plan` beside a model that holds what it says."""

import json

import pytest
import tiny_chat
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.app import app
from kvkeep.cli.plan import Shape, places

SAYS = "a text of some length, so that blocks are filled; " * 8


def test_what_is_planned_is_what_is_held():
    """Oracle: bytes that an engine counts on its tensors."""
    model = tiny_chat.model()
    shape = Shape.of(model.config)
    assert shape == Shape(2, 2, 8)
    full, history, *_ = places(shape, 320, 3, 64, torch.float32)
    with kvkeep.Engine(model, tiny_chat.tokenizer(), "snapkv", 64) as engine:
        for number in range(3):
            said = f"{number} {SAYS}"
            engine.submit([{"role": "user", "content": said[:320]}], max_new_tokens=1, ignore_eos=True).result()
        assert engine.store.histories.nbytes == history.host_bytes == full.device_bytes
    kept = kvkeep.Cache(model, "snapkv", 64)
    model(torch.randint(3, 250, (1, 320)), past_key_values=kept)
    streamed = 2 * history.host_bytes // 3 // 2
    assert history.device_bytes == 3 * kept.nbytes + streamed and places(shape, 320, 3, 64, torch.float32)[-1].loses


def test_int8_and_int4_take_the_bytes_of_their_codes():
    llama = Shape.of(LlamaConfig(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096))
    by_name = {each.name: each for each in places(llama, 32_000, 64, 2048, torch.bfloat16)}
    whole = by_name["full: all on the device"].device_bytes
    assert whole == 64 * 32_000 * 131_072 == by_name["history in bfloat16"].host_bytes
    assert 0.5 < by_name["history in int8"].host_bytes / whole < 0.57
    assert 0.25 < by_name["history in int4"].host_bytes / whole < 0.32
    assert by_name["no history"].device_bytes == whole * 2048 // 32_000
    gemma = Gemma3TextConfig(num_hidden_layers=12)
    assert Shape.of(gemma).layers == gemma.layer_types.count("full_attention") < 12


@pytest.mark.real
def test_the_command_says_it_of_the_default_model():
    done = CliRunner().invoke(app, ["plan", "--context", "32000", "--budget", "0.25"])
    assert done.exit_code == 0 and "64 conversations of 32,000 tokens, 25.0% kept" in done.stdout
    assert "history in int4" in done.stdout and "cannot see what was evicted" in done.stdout
    facts = json.loads(CliRunner().invoke(app, ["plan", "--json"]).stdout)
    assert facts["context"] == 8192 and facts["places"][1]["host_bytes"] == 64 * 8192 * facts["layers"] * 3 * 128 * 2
    for wrong in (["--budget", "auto"], ["--dtype", "int8"], ["--chats", "0"]):
        assert CliRunner().invoke(app, ["plan", *wrong]).exit_code == 2
