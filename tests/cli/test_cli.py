"""The command line: answers stream, numbers are said, and every mistake is one line a person can act on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_chat
import typer
from typer.testing import CliRunner

import kvkeep.cli.inputs
import kvkeep.cli.run
from kvkeep.cli import app
from kvkeep.cli.show import busy
from kvkeep.engine.progress import Progress
from kvkeep.errors import BadInput

EXAMPLE = Path(__file__).parents[2] / "examples" / "lighthouse.txt"
EXAMPLE_QUESTION = "What is the serial number of the replacement lamp motor?"
EXAMPLE_ANSWER = "4827163"


def kvkeep_(*args, stdin=None):
    return CliRunner().invoke(app, [str(each) for each in args], input=stdin)


def in_a_process(*args, **kwargs):
    command = [sys.executable, "-m", "kvkeep", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


@pytest.fixture
def tiny(monkeypatch):
    """The commands' model is a random one. Returns what `load` was asked for."""
    asked = []

    def load(name, **options):
        asked.append({"name": name, **options})
        return tiny_chat.model(), tiny_chat.tokenizer()

    monkeypatch.setattr(kvkeep.cli.run, "load", load)
    monkeypatch.setattr(kvkeep.cli.run, "load_tokenizer", lambda *_: tiny_chat.tokenizer())
    monkeypatch.setattr(kvkeep.cli.run, "load_context_length", lambda *_: 1024)
    monkeypatch.setattr("kvkeep.model.load.load", load)
    monkeypatch.setattr("kvkeep.model.load.check_name", lambda name: None)
    monkeypatch.setattr("kvkeep.model.load.load_tokenizer", lambda *_: tiny_chat.tokenizer())
    return asked


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("The keeper counted the geese. " * 12, encoding="utf-8")
    return path


# --- run ---


def test_run_prints_the_answer_and_what_was_saved(tiny, document):
    done = kvkeep_("run", document, "How many?", "--budget", 100, "--max-new-tokens", 5)
    assert done.exit_code == 0, done.output
    for words in ("prompt tokens", "kept per KV head", "cache holds", "would hold", "first token", "per second"):
        assert words in done.stdout
    assert done.stderr == "kvkeep_lookahead: prefill\n"  # no terminal: a log
    assert tiny[0]["name"] == "default"


def test_what_is_kept_of_the_prompt_is_told_from_the_answer(tiny, document):
    """Old: 104 kept at a budget of 100."""
    args = ("run", document, "How many?", "--budget", 100, "--max-new-tokens", 5)
    found = json.loads(kvkeep_(*args, "--json").stdout)
    assert found["kept"] == {"prompt": 100, "generated": found["new_tokens"] - 1} and found["new_tokens"] > 1
    assert f"100 of the prompt + {found['new_tokens'] - 1} generated" in kvkeep_(*args).stdout


def test_an_answer_can_be_sampled(tiny, document):
    def answer(*options):
        done = kvkeep_("run", document, "How many?", "--max-new-tokens", 8, "--json", *options)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["answer"]

    cold, hot = answer(), ("--temperature", 3)
    assert answer(*hot, "--top-k", 1) == answer(*hot, "--top-p", "1e-6") == cold
    assert answer(*hot, "--seed", 1) != cold and answer(*hot, "--seed", 1) != answer(*hot, "--seed", 2)
    assert answer(*hot, "--top-k", 40, "--seed", 1) == answer(*hot, "--top-k", 40, "--seed", 1)
    for wrong in (["--top-k", -1], ["--top-p", 0], ["--temperature", "nan"]):
        done = kvkeep_("run", document, "How many?", *wrong)
        assert done.exit_code == 2 and wrong[0].strip("-")[:3] in done.stderr


def test_run_reads_standard_input(tiny):
    done = kvkeep_("run", "-", "How many?", "--max-new-tokens", 2, "--json", stdin="Four geese.")
    assert json.loads(done.stdout)["prompt_tokens"] == len("<>Four geese.\n\nHow many?<><>") - 3


def test_run_says_that_a_short_text_is_kept_whole(tiny):
    done = kvkeep_("run", "-", "How many?", "--budget", 64, "--max-new-tokens", 2, stdin="Four geese.")
    assert "(the budget of 64 holds them all)" in done.stdout


def test_json_is_one_object_with_measured_numbers(tiny, document):
    done = kvkeep_("run", document, "How many?", "--budget", 100, "--max-new-tokens", 5, "--json")
    found = json.loads(done.stdout)
    assert found["method"] == "kvkeep_lookahead" and found["budget"] == 100 and found["model"] == "default"
    assert 0 < found["bytes"] < found["full_bytes"]
    assert found["kept_per_head"] < found["prompt_tokens"]
    assert found["first_token_s"] > 0 and found["new_tokens"] <= 5
    assert found == {"model": "default", **found["results"][0], "results": found["results"]}
    assert len(found["results"]) == 1


def test_compare_runs_full_beside_it(tiny, document):
    args = ("run", document, "How many?", "--budget", "0.3", "--max-new-tokens", 3, "--compare")
    found = json.loads(kvkeep_(*args, "--json").stdout)
    compressed, full = found["results"]
    assert compressed["bytes"] == found["bytes"] < full["bytes"]
    assert full["method"] == "full" and full["budget"] is None and full["prompt_tokens"] == found["prompt_tokens"]
    said = kvkeep_(*args).stdout
    lines = [line.split() for line in said.splitlines()]
    assert ["kvkeep_lookahead", "full"] in lines and ["budget", "0.3", "–"] in lines
    assert said.count("(100%)") == 1 and "would hold" not in said and "differences are noise" in " ".join(said.split())
    assert len(json.loads(kvkeep_(*args, "--method", "full", "--json").stdout)["results"]) == 1  # once is enough
    quantized = json.loads(kvkeep_(*args, "--method", "full", "--storage", "int8", "--json").stdout)
    assert quantized["bytes"] < quantized["results"][1]["bytes"]


def test_an_exact_answer_is_that_of_full(tiny, document):
    args = ("run", document, "How many?", "--budget", "100", "--max-new-tokens", 12, "--exact")
    mine, full = json.loads(kvkeep_(*args, "--json", "--compare").stdout)["results"]
    assert mine["answer"] == full["answer"] and mine["bytes"] < full["bytes"] and full["host_bytes"] == 0
    assert mine["exact"]["passes"] > 0 and full["exact"] == {"passes": 0, "guessed": 0, "right": 0}
    said = " ".join(kvkeep_(*args).stdout.split())
    assert f"{mine['exact']['right']} of {mine['exact']['guessed']} guesses right" in said
    assert "verified" not in kvkeep_(*args[:-1]).stdout
    done = kvkeep_(*args, "--method", "quest")
    assert done.exit_code == 2 and "error: exact=True cannot work with 'quest'" in done.stderr


def test_methods_that_are_compared_are_warmed_up_first(tiny, document, monkeypatch):
    began = []
    stream = kvkeep.Engine.stream

    def counted(engine, prompt, **options):
        began.append((engine.method.name, options["max_new_tokens"]))
        return stream(engine, prompt, **options)

    monkeypatch.setattr(kvkeep.Engine, "stream", counted)
    args = ("run", document, "How many?", "--method", "snapkv", "--budget", 64, "--max-new-tokens", 3, "--json")
    assert kvkeep_(*args, "--compare").exit_code == 0
    assert began == [("snapkv", 2), ("full", 2), ("snapkv", 3), ("full", 3)]
    began.clear()
    assert kvkeep_(*args).exit_code == 0 and began == [("snapkv", 3)]  # one alone does not wait for it


def test_several_budgets_are_run_beside_each_other(tiny, document):
    args = ("run", document, "How many?", "--budget", "64,128", "--max-new-tokens", 3)
    found = json.loads(kvkeep_(*args, "--json").stdout)
    results = found.pop("results")
    assert [(each["method"], each["budget"]) for each in results] == [("kvkeep_lookahead", n) for n in (64, 128)]
    assert found == {"model": "default", **results[0]} and results[0]["bytes"] < results[1]["bytes"]
    head = kvkeep_(*args, "--compare").stdout.split("──")[0].split()
    assert head.count("kvkeep_lookahead") == 2 and head[-3:] == ["64", "128", "full"]


def test_storage_makes_it_smaller(tiny, document):
    held = []
    for storage in ([], ["--storage", "int8"], ["--storage", "int4"]):
        done = kvkeep_("run", document, "Why?", "--budget", 128, "--max-new-tokens", 3, "--json", *storage)
        held.append(json.loads(done.stdout)["bytes"])
    assert held[1] < 0.65 * held[0] and held[2] < held[1]
    for wrong in (["--storage", "int3"], ["--storage", "int8", "--method", "h2o"]):
        done = kvkeep_("run", document, "Why?", *wrong)
        assert done.exit_code == 2 and "error: storage='int" in done.stderr


def test_options_reach_the_model_and_the_method(tiny, document, monkeypatch):
    made = []
    real = kvkeep.Engine

    def engine(model, tokenizer, *args, **kwargs):
        made.append((args, kwargs))
        return real(model, tokenizer, *args, **kwargs)

    monkeypatch.setattr(kvkeep, "Engine", engine)
    args = ("--method", "snapkv", "--budget", "0.5", "--set", "window=8", "--set", "pooling=max")
    args += ("--prefill-chunk-size", 64)
    where = ("--device", "cpu", "--dtype", "float32", "--model", "some/model", "--max-new-tokens", 2, "--json")
    done = kvkeep_("run", document, "How many?", *args, *where, "--storage", "int8")
    assert done.exit_code == 0, done.output
    assert made == [(("snapkv", 0.5), {"prefill_chunk_size": 64, "storage": "int8", "window": 8, "pooling": "max"})]
    assert {key: tiny[0][key] for key in ("name", "device", "dtype")} == {
        "name": "some/model", "device": "cpu", "dtype": "float32",
    }  # fmt: skip


def test_a_model_without_a_chat_template_is_asked_plainly(tiny, monkeypatch, document):
    monkeypatch.setattr(kvkeep.cli.run, "load", lambda *_, **__: (tiny_chat.model(), tiny_chat.tokenizer(None)))
    done = kvkeep_("run", document, "How many?", "--max-new-tokens", 2, "--json")
    assert json.loads(done.stdout)["prompt_tokens"] == len(document.read_text().strip()) + len("\n\nHow many?")


def test_the_question_comes_last_after_a_blank_line(document):
    document.write_text("\ufeff  Text.\n\n", encoding="utf-8")
    assert kvkeep.cli.inputs.prompt(str(document), " Why? ") == ("Text.", "Why?")
    engine = kvkeep.Engine(tiny_chat.model(), tiny_chat.tokenizer(), "full", None)
    assert engine.length("Text.", "Why?") == len("<>Text.\n\nWhy?<><>") - 3


# --- mistakes ---


def refused(*args, stdin=None, after=()):
    """The one line a mistake is answered with, after the steps that came before it."""
    done = kvkeep_(*args, stdin=stdin)
    assert done.exit_code == 2, done.output
    *steps, said = done.stderr.splitlines()
    assert done.stdout == "" and steps == list(after) and said.startswith("error: ")
    return said


@pytest.fixture
def no_model(monkeypatch):
    """Mistakes below are found before any model is loaded."""
    for place in ("kvkeep.cli.run", "kvkeep.model.load"):
        for name in ("load", "load_tokenizer", "load_context_length"):
            monkeypatch.setattr(f"{place}.{name}", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"%PDF\0\1", "binary (a NUL at byte 4); turn it into plain text"),
        (b"caf\xe9", "is not UTF-8 text (byte 3 is 0xe9); convert it first"),
    ],
)
def test_a_document_that_is_no_text(tmp_path, content, says):
    path = tmp_path / "odd"
    path.write_bytes(content)
    assert says in (said := refused("run", path, "Why?")) and "odd" in said
    assert says in (said := refused("run", "-", "Why?", stdin=content)) and "standard input" in said


@pytest.mark.usefixtures("no_model")
def test_a_document_that_cannot_be_read(tmp_path, monkeypatch, document):
    assert "there is no file" in refused("run", tmp_path / "missing.txt", "Why?")
    assert "is a folder; give one text file" in refused("run", tmp_path, "Why?")
    assert "cannot be read" in refused("run", "x" * 5000, "Why?")

    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "cannot be read (Permission denied); check" in refused("run", document, "Why?")


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budget", "many"], "--budget 'many' is not a number"),
        (["--budget", "true"], "--budget 'true' is not a number"),
        (["--budget", "0"], "budget=0"),
        (["--budget", "-5"], "budget=-5"),
        (["--budget", "1.5"], "budget=1.5"),
        (["--budget", "nan"], "budget=nan"),
        (["--method", "snapvk"], "'snapkv'"),
        (["--method", "streamingllm", "--budget", "3"], "budget=3 cannot hold the 4 sinks"),
        (["--method", "snapkv+adakvv"], "'adakv'"),
        (["--set", "window"], "'window' is not name=value"),
        (["--set", "=3"], "'=3' is not name=value"),
        (["--set", "windw=3"], "windw"),
        (["--method", "snapkv", "--set", "window=-1"], "window"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_be(document, options, says):
    assert says in refused("run", document, "Why?", *options)


@pytest.mark.usefixtures("no_model")
def test_an_empty_question(document):
    assert "the question is empty" in refused("run", document, "  ")


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "meta"], "device='meta' holds no values"),
        (["--device", "gpu"], "device='gpu' cannot be used here"),
        (["--dtype", "int7"], "dtype='int7' is not one of"),
    ],
    ids=" ".join,
)
def test_a_place_that_cannot_be(document, tmp_path, options, says):
    for command in (
        ("run", document, "Why?"),
        ("eval", "--tasks", "needle", "--out", tmp_path / "out"),
        ("bench", "--shape", "tiny", "--out", tmp_path / "out"),
        ("reproduce", "protokv/table2", "--small", "--out", tmp_path / "out"),
    ):
        assert says in refused(*command, *options), command
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("package", "args", "says"),
    [
        ("ray", ["--tasks", "needle", "--ray"], "pip install 'kvkeep[ray]'"),
        ("jieba", ["--tasks", "longbench/dureader"], "is scored with jieba, which is missing (pip install"),
        ("datasets", ["--tasks", "wic"], "with `datasets`, which is missing (pip install 'kvkeep[eval]')"),
        ("wonderwords", ["--tasks", "niah_single_1"], "needs wonderwords (pip install wonderwords"),
    ],
)
def test_a_missing_extra_is_said_before_anything_is_loaded(tmp_path, monkeypatch, package, args, says):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))  # nothing was fetched before
    monkeypatch.setitem(sys.modules, package, None)
    assert says in refused("eval", *args, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_model")
def test_tasks_and_files_are_checked_before_anything_is_loaded(tmp_path):
    assert "no task 'niha'" in refused("eval", "--tasks", "niha", "--out", tmp_path / "out")
    said = refused("eval", "--tasks", "longbench/qasper", "--data", tmp_path, "--out", tmp_path / "out")
    assert "has no file qasper.jsonl" in said
    assert "--haystack 'nowhere' is not there" in refused("reproduce", "protokv/table2", "--haystack", "nowhere")


def test_a_document_longer_than_the_window(tiny, document):
    document.write_text("x" * 2000)
    said = refused("run", document, "Why?")
    assert "has 2009 tokens" in said and "length is 1024" in said and "shorten the prompt by 1049 tokens" in said
    assert "actqkv" in said  # the way out
    assert tiny == []  # known before the weights were loaded


@pytest.mark.parametrize(
    "method", ["actqkv", "infllm", "tokenselect", "emllm", "intelllm", "streamingllm", "lm_infinite"]
)
def test_a_document_longer_than_the_window_with_a_method_that_reads_on(tiny, document, method):
    document.write_text("".join(chr(97 + i * i % 26) for i in range(2000)))
    done = kvkeep_("run", document, "Why?", "--method", method, "--budget", 128, "--max-new-tokens", 3, "--json")
    found = json.loads(done.stdout)
    assert found["prompt_tokens"] == 2009 and found["kept_per_head"] <= 128 + 2
    assert (found["host_bytes"] > 0) == (method not in ("intelllm", "streamingllm", "lm_infinite"))
    if method == "infllm":
        shown = kvkeep_("run", document, "Why?", "--method", method, "--budget", 128).stdout
        assert "offloaded" in shown and "(2.0 × the model's context length)" in " ".join(shown.split())


def test_a_model_that_is_not_there(document):
    assert "no model folder at './nowhere'" in refused("run", document, "Why?", "--model", "./nowhere")


def test_an_unknown_model_is_refused_before_anything_heavy_is_imported(document, tmp_path):
    """Old: after more than a minute, most of it between attempts to reach the hub."""
    asked = {"run": [str(document), "Why?"], "inspect": [str(document), "Why?"], "chat": [], "serve": [], "bench": []}
    asked["eval"] = ["--tasks", "ruler", "--out", str(tmp_path / "out")]
    code = f"""
import sys
from typer.testing import CliRunner
from kvkeep.cli import app
for command, args in {asked}.items():
    done = CliRunner().invoke(app, [command, *args, "--model", "smollm2-135m-instuct"])
    print(command, done.exit_code, done.stderr.count("\\n"), done.stderr[-40:], end="")
print("torch" in sys.modules)
"""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    said = "Did you mean 'smollm2-135m-instruct'?\n"
    assert [line[-len(said) :] for line in done.stdout.splitlines(True)] == [said] * 6 + ["False\n"], done.stderr
    assert done.stdout.count(" 2 1 ") == 6


def test_wrong_usage_is_status_2_and_a_bug_is_1(tiny, document, monkeypatch):
    assert kvkeep_("run", document).exit_code == 2
    assert kvkeep_("run", document, "Why?", "--max-new-tokens", 0).exit_code == 2
    monkeypatch.setattr(kvkeep.cli.run, "ask", lambda *_, **__: 1 / 0)
    assert kvkeep_("run", document, "Why?").exit_code == 1


def test_ctrl_c_is_130(tiny, monkeypatch, document):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvkeep.cli.run, "load", interrupted)
    done = kvkeep_("run", document, "Why?")
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")


# --- the other commands ---


def test_methods_lists_every_method_with_its_parameters():
    listed = {each["name"]: each for each in json.loads(kvkeep_("methods", "--json").stdout)}
    assert list(listed) == list(kvkeep.methods)
    assert all(each["keeps"] for each in listed.values())
    table = kvkeep_("methods").stdout
    assert all(name in table for name in listed)
    assert "arXiv:2404.14469" in table and "window=" in table
    assert json.loads(kvkeep_("methods", "snapkv", "--json").stdout) == [listed["snapkv"]]
    some = kvkeep_("methods", "snapkv", "+adakv").stdout
    assert "arXiv:2404.14469" in some and "arXiv:2407.11550" in some and "h2o" not in some and "+shared" not in some
    assert "alpha" in kvkeep_("methods", "+adakv").stdout and "Did you mean 'snapkv'" in refused("methods", "snapvk")


@pytest.mark.parametrize("width", [80, 120])
def test_methods_tells_what_each_can_do(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = kvkeep_("methods").stdout.splitlines()
    assert max(map(len, lines)) <= width
    table = lines[next(n for n, line in enumerate(lines) if "query-aware" in line) :]
    traits = {words[0]: words[1:] for line in table if (words := re.split(r" {2,}", line.strip()))[0] in kvkeep.methods}
    assert list(traits) == list(kvkeep.methods)
    assert traits["snapkv"] == ["yes", "no", "no", "yes"]
    assert traits["streamingllm"] == ["no", "yes", "no", "yes"]
    assert traits["infllm"] == ["retrieves", "yes", "yes", "no"]
    assert traits["quest"] == ["retrieves", "no", "yes", "no"]
    listed = {each["name"]: each for each in json.loads(kvkeep_("methods", "--json").stdout)}
    assert listed["snapkv"]["query_aware"] and not listed["h2o"]["query_aware"]
    assert listed["infllm"]["any_length"] and not listed["infllm"]["can_be_saved"] and not listed["full"]["offloads"]


def test_models_lists_the_default_and_better_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    listed, *others = json.loads(kvkeep_("models", "--json").stdout)
    assert (listed["name"], listed["context_length"], listed["on_disk"]) == ("smollm2-135m-instruct", 8192, False)
    assert len(others) > 5 and all("/" in each["name"] for each in others)
    said = kvkeep_("models").stdout
    assert "Apache-2.0" in said and "hf download" in said and "--model path/to/folder" in said


def test_help_says_the_exit_codes_and_imports_nothing_heavy():
    code = (
        "import sys; from kvkeep.cli import app; app(['--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "130" in done.stdout and "stderr" in done.stdout
    assert "130" in kvkeep_("run", "--help").stdout


def test_every_help_is_a_whole_phrase():
    """Old: "Of sampling; 0: greedy.", "Under way for one key."."""
    commands = typer.main.get_command(app).commands
    said = {f"{name} {each.name}": each.help for name, command in commands.items() for each in command.params}
    said |= {name: command.help for name, command in commands.items()}
    poor = r"(Of|Else|Under|Until|For|As|On|By|In place)\b"
    assert len(said) > 90
    assert not {k: v for k, v in said.items() if not (v and v[0].isupper() and len(v.split()) > 3) or re.match(poor, v)}


def test_the_manual_has_the_default_methods_and_budget_of_every_command():
    manual = Path(__file__).parents[2] / "docs" / "MANUAL.md"
    table = re.findall(r"^\| `kvkeep (\w+)` \| (.+) \| (\d+) \|$", manual.read_text(), re.MULTILINE)
    takes_a_method = set()
    for name, command in typer.main.get_command(app).commands.items():
        options = {each.name: each for each in command.params}
        if "budget" in options and (own := options.get("method") or options.get("methods")):
            takes_a_method.add(name)
            shown = [
                each.show_default if isinstance(each.show_default, str) else each.default
                for each in (own, options["budget"])
            ]
            assert (name, shown[0].replace(",", ", "), shown[1]) in table
    assert takes_a_method == {name for name, _, _ in table}


def test_nothing_at_all_shows_the_help():
    done = kvkeep_()
    assert (done.exit_code, done.stderr) == (0, "") and done.stdout == kvkeep_("--help").stdout
    assert in_a_process().returncode == 0


def test_version_is_the_packages():
    assert kvkeep_("--version").stdout == f"kvkeep {kvkeep.__version__}\n"


def test_an_error_in_a_real_process_is_one_line():
    done = in_a_process("run", "missing.txt", "Why?")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: there is no file 'missing.txt'; check the path, or use - for standard input.\n"


def test_a_reader_that_stops_early_gets_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvkeep", "models"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr


# --- parts ---


def test_progress_is_told_in_words():
    assert str(Progress(2048, 65536, 10.0)) == "prefilled 2,048 of 65,536 tokens, 205/s, 5:10 left"
    assert str(Progress(300, 300, 2.0)) == "prefilled 300 of 300 tokens, 150/s"


def test_the_spinner_shows_only_to_a_person(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with busy("reading") as say:
        say("1,234 done")
        say.often("1,235 done")
        say.stop()
    assert "1,235 done" in capsys.readouterr().err


def test_where_nobody_sees_the_spinner_steps_are_lines_of_a_log(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("kvkeep.cli.show.time.monotonic", lambda: clock[0])
    with busy("starting") as say:
        say("loading")
        for clock[0] in range(25):
            say.often(f"read {clock[0]}")
    assert capsys.readouterr().err == "loading\nread 10\nread 20\n"
    with busy("starting") as say:
        for clock[0] in range(24, 200):
            say.count(clock[0] - 23, 300)
        say.count(300, 300)
    assert capsys.readouterr().err == "61 of 300 rows\n121 of 300 rows\n300 of 300 rows\n"


# --- for real ---


@pytest.mark.real
def test_the_example_is_answered_rightly():
    """The default method: `make first-run`, and tests/test_docs.py."""
    found = json.loads(kvkeep_("run", EXAMPLE, EXAMPLE_QUESTION, "--method", "intentkv", "--json").stdout)
    assert EXAMPLE_ANSWER in found["answer"]
    assert 1500 < found["prompt_tokens"] < 2500


@pytest.mark.real
def test_make_run_asks_this_question():
    makefile = (EXAMPLE.parent.parent / "Makefile").read_text()
    assert f"QUESTION := {EXAMPLE_QUESTION}\n" in makefile and f"DOCUMENT := examples/{EXAMPLE.name}\n" in makefile


# --- kvkeep eval ---


@pytest.fixture
def official(tmp_path):
    """A folder with one LongBench task and MATH-500, two samples each."""
    folder = tmp_path / "data" / "longbench"
    folder.mkdir(parents=True)
    line = {
        "context": "Four geese flew south.",
        "answers": ["four"],
        "all_classes": None,
        "length": 4,
        "dataset": "qasper",
    }
    lines = [json.dumps({**line, "input": f"How many? {n}", "_id": str(n)}) for n in range(2)]
    (folder / "qasper.jsonl").write_text("\n".join(lines))
    problems = [json.dumps({"problem": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(2)]
    (tmp_path / "data" / "math500.jsonl").write_text("\n".join(problems))
    return tmp_path / "data"


def test_eval_scores_methods_and_goes_on_where_it_was(tiny, official, tmp_path, monkeypatch):
    window = ("--model", "default", "--protocol", "aware", "--out", tmp_path / "out", "--data", official)
    args = ("eval", "--tasks", "longbench/qasper", "--methods", "full,snapkv,h2o", "--budget", "64,0.5", *window)
    done = kvkeep_(*args)
    assert done.exit_code == 0, done.output
    assert "10 rows in" in done.stdout and all(word in done.stdout for word in ("qasper", "snapkv", "0.5", "n=2"))
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    monkeypatch.setattr("kvkeep.evaluate.worker.Worker.__call__", lambda *_: pytest.fail("answered again"))
    assert kvkeep_(*args).exit_code == 0 and (tmp_path / "out" / "rows.jsonl").read_bytes() == before
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 6


def test_eval_names_what_it_leaves_out(tiny, official, tmp_path):
    args = ("eval", "--tasks", "longbench,wic,qa_1", "--methods", "full", "--data", official, "--out", tmp_path / "out")
    done = kvkeep_(*args, "--limit", 1)
    assert done.exit_code == 0 and "2 rows in" in done.stdout
    assert "left out: wic has no file wic.jsonl" in done.stderr and "left out: qa_1 reads a file" in done.stderr


def test_eval_says_what_became_of_the_prompts(tiny, official, tmp_path, monkeypatch):
    args = ("eval", "--tasks", "longbench/qasper", "--methods", "full", "--data", official, "--protocol", "aware")
    long = json.loads((official / "longbench" / "qasper.jsonl").read_text().splitlines()[0])
    lines = [json.dumps({**long, "_id": str(n), "context": "goose " * (1 + n * 400)}) for n in range(3)]
    (official / "longbench" / "qasper.jsonl").write_text("\n".join(lines))
    model = tiny_chat.model(window=4096)
    monkeypatch.setattr("kvkeep.model.load.load", lambda *_, **__: (model, tiny_chat.tokenizer()))
    done = kvkeep_(*args, "--out", tmp_path / "a")
    assert "note: qasper: 1 of 3 prompts were too long and lost up to" in done.stderr
    bare = tiny_chat.tokenizer(template=None)
    monkeypatch.setattr("kvkeep.model.load.load", lambda *_, **__: (model, bare))
    done = kvkeep_(*args, "--out", tmp_path / "b")
    assert "note: no prompt went through a chat template" in done.stderr


def test_eval_takes_a_config_file(tiny, official, tmp_path):
    config = tmp_path / "grid.yaml"
    config.write_text(f"tasks: [longbench/qasper]\nmethods: full\nprotocol: agnostic\nlimit: 1\ndata: {official}\n")
    done = kvkeep_("eval", "--config", config, "--out", tmp_path / "out", "--limit", 2)
    assert done.exit_code == 0, done.output
    assert "2 rows in" in done.stdout


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("tasks: wic\nbudgets: 4\n", "unknown keys budgets; known: tasks, out, methods, budget"),
        ("- tasks\n", "should map names to values"),
        ("tasks: [", "is not YAML"),
        ("tasks: wic\nbudget: many\n", "--budget 'many' are not numbers"),
        ("tasks: wic\nprotocol: blind\n", "protocol 'blind' is not known"),
        ("tasks: wic\nmethods: snapkw\n", "snapkw"),
        ("methods: full\n", "--tasks is missing"),
        ("tasks: wic\nlimit: abc\n", "--limit 'abc' is not a whole number from 1 on"),
        ("tasks: wic\nlimit: 0\n", "--limit 0 is not a whole number from 1 on"),
        ("tasks: wic\nmax_length: 10x\n", "--max-length '10x' is not a whole number"),
        ("tasks: wic\nshare: 3\n", "share: 3 should be true or false"),
        ("tasks: wic\nmodel: [a]\n", "model: ['a'] should be a text"),
    ],
)
def test_a_config_file_that_makes_no_sense(tmp_path, content, says):
    (tmp_path / "grid.yaml").write_text(content)
    assert says in refused("eval", "--config", tmp_path / "grid.yaml", "--out", tmp_path / "out")


@pytest.mark.usefixtures("no_model")
def test_an_out_that_is_a_file_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("")
    for command in (("eval", "--tasks", "niah_single_1"), ("bench", "--shape", "tiny")):
        assert "cannot be made a folder" in refused(*command, "--out", tmp_path / "file")


def test_a_table_too_wide_is_turned(capsys, monkeypatch):
    from kvkeep.cli.show import print_scores

    facts = {"kept_per_head": 4.0, "bytes": 10, "full_bytes": 100, "truncated": 0, "metric": "longbench_qa_f1"}
    rows = [
        {
            "task": f"niah_multikey_{i}_4096",
            "protocol": "aware",
            "method": "snapkv:window=16",
            "budget": 64,
            "score": 1.0,
        }
        for i in range(6)
    ]
    monkeypatch.setenv("COLUMNS", "80")
    print_scores([row | facts for row in rows])
    lines = [line for line in capsys.readouterr().out.splitlines() if "niah" in line]
    assert [line.split()[0] for line in lines] == [row["task"] for row in rows]
    assert all("snapkv:window=16" in line and "100.0 [21, 100] n=1" in line for line in lines)


def test_averages_of_longbench_are_named(capsys, monkeypatch):
    from kvkeep.cli.show import print_scores

    facts = {"protocol": "aware", "method": "full", "budget": None, "metric": "longbench", "truncated": 0}
    facts |= {"kept_per_head": 4.0, "bytes": 10, "full_bytes": 100}
    scores = {"qasper": 0.2, "hotpotqa": 0.4, "musique": 0.6}
    monkeypatch.setenv("COLUMNS", "100")
    print_scores([{"task": task, "score": score, **facts} for task, score in scores.items()])
    said = capsys.readouterr().out
    assert re.search(r"LongBench, mean of 3 tasks +full +– +40\.0", said)
    assert re.search(r"LongBench, mean of 2 categories +full +– +35\.0", said)


def test_eval_with_nothing_to_do(tiny, tmp_path, monkeypatch):
    def fetch(name, say=None):
        raise BadInput(f"'{name}' could not be fetched; check the network, or give --data DIR.")

    monkeypatch.setattr("kvkeep.evaluate.suite.fetch", fetch)
    said = refused("eval", "--tasks", "wic", "--out", tmp_path / "out", after=["making samples"])
    assert "none of these tasks can be had: wic is not here: 'wic' could not be fetched" in said and "--data" in said
    assert "no task 'niha'. Did you mean 'niah'?" in refused("eval", "--tasks", "niha", "--out", tmp_path / "out")
    other = tmp_path / "other"
    assert "--data 'nowhere' is not there" in refused("eval", "--tasks", "wic", "--out", other, "--data", "nowhere")
    assert not other.exists()


# --- inspect ---


def test_inspect_writes_a_page(tiny, document, tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.pages.load", kvkeep.cli.run.load)
    args = ("inspect", document, "How many?", "--max-new-tokens", 3, "-o", tmp_path / "page.html")
    done = kvkeep_(*args, "--methods", "snapkv, full,streamingllm,snapkv", "--budget", 100)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'page.html'}: ") and "snapkv: prefill" in done.stderr
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall(r'"name":"(\w+)","budget"', html) == ["full", "snapkv", "streamingllm"]
    again = kvkeep_(*args, "--methods", "kvkeep_context", "--budget", 0.5, "--protocol", "agnostic")
    assert again.exit_code == 0 and '"protocol":"agnostic"' in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "args, says",
    [
        (("--methods", "snapvk"), "Did you mean 'snapkv'"),
        (("--protocol", "both"), "use aware or agnostic"),
        (("--budget", "many"), "is not a number"),
        (("-o", "/nowhere/page.html"), "make it first"),
        (("-o", "/"), "is a folder"),
    ],
)
def test_mistakes_of_inspect_are_said_before_a_model_is_loaded(tiny, document, args, says):
    done = kvkeep_("inspect", document, "How many?", *args)
    assert done.exit_code == 2 and says in done.stderr and not tiny
