"""Methods and tasks of other packages: by decorator, and by entry points of a package that is installed."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent

import pytest
import tiny_chat
import torch
from conftest import make_llama

import kvkeep
from kvkeep import registry
from kvkeep.compress.presets import METHODS
from kvkeep.compress.retrieval.chunking import Chunks
from kvkeep.compress.retrieval.config import RetrievalConfig
from kvkeep.errors import BadCacheFile, BadInput, BadParameter, CacheMisuse, NoData, UnknownName
from kvkeep.evaluate import suite
from kvkeep.evaluate.datasets import SOURCES, Source

SOURCE = str(Path(kvkeep.__file__).parents[1])
PACKAGE = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"
        [project]
        name = "kvkeep-more"
        version = "1"
        [project.entry-points."kvkeep.methods"]
        more = "kvkeep_more.methods"
        broken = "kvkeep_more.broken"
        [project.entry-points."kvkeep.tasks"]
        more = "kvkeep_more.tasks"
        """,
    "kvkeep_more/__init__.py": "",
    "kvkeep_more/broken.py": "import a_package_nobody_has",
    "kvkeep_more/methods.py": """
        import kvkeep
        from kvkeep.compress.retrieval.chunking import Chunks
        from kvkeep.compress.retrieval.config import RetrievalConfig

        class KeyNorm:
            def __call__(self, seen, budget):
                return -seen.keys.float().norm(dim=-1)

        class FirstKeys:
            needs = frozenset()

            def build(self, tokens):
                heads, n, dim = tokens.keys.shape
                return tokens.keys.view(heads, tokens.count, -1, dim)[:, :, 0]

            def score(self, query, unit_index, sizes):
                mean = query.queries.float().mean(1).view(query.kv_heads, -1, query.queries.shape[-1]).mean(1)
                return (unit_index.float() @ mean[..., None])[..., 0]

        @kvkeep.register_method("key-norm", paper="arXiv:2406.11430", keeps="keys of small norm")
        def key_norm(sinks=4):
            return kvkeep.Method(scorer=KeyNorm(), guard=kvkeep.Guard(sinks))

        @kvkeep.register_method("first-keys", keeps="everything; chunks are retrieved by their first key")
        def first_keys(chunk=8):
            return kvkeep.Method(retrieval=RetrievalConfig(Chunks(chunk), FirstKeys(), None, "original"))
        """,
    "kvkeep_more/tasks.py": """
        import json
        import kvkeep
        from kvkeep.evaluate.sample import Sample

        @kvkeep.register_task("riddles")
        def riddles(path):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            asked = [("riddles", str(i), row["ask"], (row["answer"],)) for i, row in enumerate(rows)]
            return [Sample(*each, "ruler_string_match_all", max_new_tokens=4) for each in asked]
        """,
}
SESSION = """
    import sys, torch, warnings, kvkeep
    from kvkeep.errors import BadCacheFile, UnknownName
    warnings.simplefilter("ignore")
    model, tokenizer = kvkeep.load(sys.argv[1])
    ids = tokenizer("The keeper counted the geese. " * 8, return_tensors="pt").input_ids
    cache = kvkeep.Cache(model, "key-norm+adakv", 64)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert cache.report().kept_per_head == 64 and "key-norm" in kvkeep.methods
        cache.save(sys.argv[2])
        again = kvkeep.Cache.load(sys.argv[2], model)
        one, two = (model(ids[:, :3], past_key_values=each).logits for each in (cache, again))
        assert one.equal(two)
        retrieving = kvkeep.Cache(model, "first-keys", 64)
        model(ids, past_key_values=retrieving)
        model(ids[:, :1], past_key_values=retrieving)
        assert retrieving.report().kept_per_head <= 64
    try:
        kvkeep.Cache(model, "key-nrm", 64)
    except UnknownName as error:
        print(error)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package, as pip installs it, and one with a tiny model."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in PACKAGE.items():
        path = folder / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    how = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(folder / "package")], check=True)
    tiny_chat.model().save_pretrained(folder / "model")
    tiny_chat.tokenizer().save_pretrained(folder / "model")
    return folder


def python(installed, *args):
    paths = os.pathsep.join([str(installed / "site"), SOURCE])
    done = subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_command_line_lists_and_runs_it_and_a_broken_one_harms_nobody(installed):
    done = python(installed, "-m", "kvkeep", "methods", "--json")
    listed = {each["name"]: each for each in json.loads(done.stdout)}
    assert listed["key-norm"]["paper"] == "arXiv:2406.11430" and listed["key-norm"]["parameters"] == {"sinks": 4}
    assert listed["first-keys"]["offloads"] and "snapkv" in listed
    assert "the plugin 'broken' (kvkeep_more.broken, in kvkeep.methods)" in done.stderr
    assert "No module named 'a_package_nobody_has'" in done.stderr
    (installed / "document.txt").write_text("The keeper counted the geese. " * 8)
    how = ["--model", installed / "model", "--budget", 64, "--max-new-tokens", 2, "--json"]
    done = python(
        installed, "-m", "kvkeep", "run", installed / "document.txt", "?", "--method", "key-norm:sinks=2", *how
    )
    assert json.loads(done.stdout)["kept"]["prompt"] == 64


def test_a_cache_takes_it_with_a_modifier_and_is_saved_and_loaded(installed):
    done = python(installed, "-c", dedent(SESSION), installed / "model", installed / "saved")
    assert "Did you mean 'key-norm'?" in done.stdout
    model = kvkeep.load(str(installed / "model"))[0]
    with pytest.raises(
        BadCacheFile, match=r"cache of 'key-norm\+adakv'.*import that package, or kvkeep.register_method"
    ):
        kvkeep.Cache.load(installed / "saved", model)


@pytest.mark.slow
def test_its_task_is_evaluated(installed):
    (installed / "riddles.jsonl").write_text(json.dumps({"ask": "What has keys?", "answer": "a cache"}))
    how = ["--methods", "full,key-norm", "--budget", 64, "--model", installed / "model", "--data", installed]
    python(installed, "-m", "kvkeep", "eval", "--tasks", "riddles", *how, "--out", installed / "out")
    rows = [json.loads(line) for line in (installed / "out" / "rows.jsonl").read_text().splitlines()]
    assert {(row["task"], row["method"]) for row in rows} == {("riddles", "full"), ("riddles", "key-norm")}


# --- by decorator, in this process ---


class KeyNorm:
    def __call__(self, seen, budget):
        return -seen.keys.norm(dim=-1)


class Empty:
    pass


class OneArgument(KeyNorm):
    def step(self, step):
        raise NotImplementedError


class Needy:
    needs = frozenset({"masses"})

    def build(self, tokens): ...
    def score(self, query, unit_index, sizes): ...


@pytest.fixture
def registered():
    """What a test registers is forgotten after it."""
    kept = [(each, dict(each)) for each in (METHODS, suite.READ, SOURCES)]
    yield
    for each, before in kept:
        for name in set(each) - set(before):
            del each[name]


def small_keys(sinks=4):
    return kvkeep.Method(scorer=KeyNorm(), guard=kvkeep.Guard(sinks))


def test_a_registered_method_is_a_method(registered, tmp_path):
    assert (
        kvkeep.register_method("small_keys", paper="arXiv:2406.11430", keeps="keys of small norm")(small_keys)
        is small_keys
    )
    assert kvkeep.methods["small_keys"].keeps == "keys of small norm" and list(kvkeep.methods)[-1] == "small_keys"
    keys = torch.randn(2, 40, 8)
    kept = kvkeep.select("small_keys", keys, keys, keys, 8, sinks=2).tolist()
    small = keys[:, 2:].norm(dim=-1).argsort()[:, :6] + 2
    assert kept == [sorted([0, 1, *row]) for row in small.tolist()]
    model, ids = make_llama(), torch.arange(60)[None]
    cache = kvkeep.Cache(model, "small_keys+adakv", 16, sinks=1)
    model(ids, past_key_values=cache)
    cache.save(tmp_path / "saved")
    assert kvkeep.Cache.load(tmp_path / "saved", model).method.guard.sinks == 1
    del METHODS["small_keys"]
    with pytest.raises(BadCacheFile, match=r"kvkeep\.register_method\('small_keys'\)"):
        kvkeep.Cache.load(tmp_path / "saved", model)


def test_a_method_without_a_name_works_and_is_not_saved(tmp_path):
    model = make_llama()
    cache = kvkeep.Cache(model, kvkeep.Method(scorer=KeyNorm(), guard=kvkeep.Guard(4)), 16)
    model(torch.arange(60)[None], past_key_values=cache)
    assert cache.report().kept_per_head == 16
    with pytest.raises(CacheMisuse, match=r"kvkeep\.register_method"):
        cache.save(tmp_path / "saved")
    with pytest.raises(BadParameter, match="this method needs a budget"):
        kvkeep.Cache(model, kvkeep.Method(scorer=KeyNorm()))


@pytest.mark.parametrize(
    "build, says",
    [
        (lambda: kvkeep.Method(scorer=Empty()), r"the scorer Empty has no __call__\(observation, budget\)"),
        (lambda: kvkeep.Method(scorer=KeyNorm), r"the scorer KeyNorm is a class, not a value; write KeyNorm\(\)"),
        (lambda: kvkeep.Method(scorer=OneArgument()), r"the scorer OneArgument has no step\(step, budget\)"),
        (lambda: kvkeep.Method(scorer=KeyNorm(), memory=KeyNorm()), "the memory KeyNorm has no width"),
        (lambda: kvkeep.Method(scorer=KeyNorm(), layers=Empty()), "the layers Empty has no layer_weight"),
        (lambda: kvkeep.Method(scorer=KeyNorm(), guard=4), "guard=4 is not a Guard"),
        (lambda: kvkeep.Method(retrieval=RetrievalConfig(Chunks(), Empty())), "the index Empty has no needs"),
        (lambda: kvkeep.Method(retrieval=RetrievalConfig(Chunks(), Needy())), "needs 'masses'.* Did you mean 'mass'"),
        (lambda: kvkeep.Method(retrieval=RetrievalConfig(Empty(), Needy())), "the chunking Empty has no contiguous"),
        (lambda: KeyNorm(), "should return a kvkeep.Method"),
        (lambda sinks: small_keys(sinks), "the parameter 'sinks' needs a name and a default"),
    ],
)
def test_what_is_missing_is_said_when_it_is_registered(build, says):
    with pytest.raises(BadParameter, match=f"^'small_keys': .*{says}"):
        kvkeep.register_method("small_keys")(build)
    assert "small_keys" not in kvkeep.methods


@pytest.mark.parametrize("register", [kvkeep.register_method, kvkeep.register_task])
@pytest.mark.parametrize("name", ["a+b", "a:b", "a=b", "a,b", "a b", "a/b", "", None])
def test_names_that_cannot_be_written_are_refused(register, name):
    with pytest.raises(BadParameter, match="use letters"):
        register(name)


def test_taken_names_are_refused(registered):
    with pytest.raises(BadParameter, match="there is a method named 'snapkv' already"):
        kvkeep.register_method("snapkv")
    for name in ("ruler", "niah_single_1", "passkey", "wic", "longbench"):
        with pytest.raises(BadParameter, match=f"there is a task named '{name}' already"):
            kvkeep.register_task(name)


def test_a_registered_task(registered, tmp_path):
    kvkeep.register_task("mine")(lambda path: [])
    kvkeep.register_task("hub", Source("me/mine", split="test"))(lambda path: "text")
    assert {"mine", "hub"} <= set(suite.names()) and SOURCES["hub"].repo == "me/mine"
    with pytest.raises(NoData, match=r"mine has no dataset on the hub; give a folder with mine\.jsonl: --data DIR"):
        suite.check(["mine"], suite.Sources())
    (tmp_path / "hub.jsonl").write_text("{}")
    with pytest.raises(BadInput, match="task 'hub' should return a list of Sample, not 'text'"):
        suite.load(["hub"], None, suite.Sources(data=tmp_path))
    with pytest.raises(UnknownName, match="Did you mean 'mine'"):
        suite.check(["mine_"], suite.Sources())


def test_a_plugin_that_cannot_be_imported_is_a_warning(monkeypatch):
    point = EntryPoint("bad", "no_such_module.at_all", "kvkeep.methods")
    monkeypatch.setattr(registry, "_loaded", set())
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with pytest.warns(UserWarning, match=r"the plugin 'bad' \(no_such_module.at_all, in kvkeep.methods\)"):
        assert "snapkv" in kvkeep.methods
    assert len(kvkeep.methods) == len(METHODS)  # asked once
