"""Every table of the five papers, and figures: transcribed exactly, and runnable as they stand."""

import csv
import re
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path

import pytest
import tiny_chat
from typer.testing import CliRunner

from kvkeep.cli import reproduce as command
from kvkeep.cli.options import BenchOptions
from kvkeep.compress.parse import parse
from kvkeep.errors import UnknownName
from kvkeep.evaluate import suite, summary
from kvkeep.evaluate.recipes import compare as comparison
from kvkeep.evaluate.recipes.compare import compare, mean, row_name
from kvkeep.evaluate.recipes.recipe import PAPERS, _read, jobs, names, recipe, shrink, used
from kvkeep.evaluate.tasks import infinitebench, longbench
from kvkeep.model.random_models import SHAPES

TABLES = {"intentkv": 10, "intelllm": 4, "ahakv": 3, "actqkv": 10, "protokv": 11}
FIGURES = {"intentkv": 10, "intelllm": 2, "ahakv": 8, "actqkv": 5, "protokv": 38}
RECIPES = [recipe(name) for name in names()]
SCORED = [each for each in RECIPES if each.kind == "scores"]
BOTH = SCORED + [shrink(each) for each in SCORED]


def by_name(each):
    return each.name + ("" if each.limit is None else " small")


def rows(each):
    """Numbers of each printed row, by column."""
    found = {}
    for cell in each.cells:
        if cell.number is not None and not cell.beside:
            found.setdefault((cell.group, cell.budget, cell.label), {})[cell.column] = cell.number
    return found


def digits(numbers):
    return max(len(f"{number:.10f}".rstrip("0").partition(".")[2]) for number in numbers)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_is_there(paper):
    assert {f"{paper}/table{n}" for n in range(1, TABLES[paper] + 1)} <= set(names())
    found = [recipe(f"{paper}/figure{n}").name for n in range(1, FIGURES[paper] + 1)]  # of a range of figures, its name
    assert set(found) == {name for name in names() if name.startswith(f"{paper}/figure")}


@pytest.mark.parametrize("each", RECIPES, ids=by_name)
def test_every_number_of_the_file_is_a_cell_and_no_other(each):
    paper, _, table = each.name.partition("/")
    written = [row for rows in _read(paper)["tables"][table].get("numbers", {}).values() for row in rows.values()]
    numbers = [float(number) for row in written for number in str(row).split() if number not in ("-", "?")]
    assert sorted(number for row in rows(each).values() for number in row.values()) == sorted(numbers)


@pytest.mark.parametrize("each", [each for each in SCORED if each.average], ids=by_name)
def test_printed_averages_are_the_means_of_their_rows(each):
    """To rounding; those that are not are listed as misprints, with the right value."""
    weight = {column.name: len(column.points) for column in each.columns}
    rounding = 10.0 ** -digits([row[each.average] for row in rows(each).values()])
    wrong = {}
    for (group, budget, label), row in rows(each).items():
        parts = {column: number for column, number in row.items() if column != each.average}
        right = sum(weight[c] * number for c, number in parts.items()) / sum(weight[c] for c in parts)
        if abs(right - row[each.average]) > rounding * 1.0001:
            wrong[group, budget, label] = right
    listed = {at: m["mean"] for m in each.misprints if (at := place(m["at"], each)) and m["at"].endswith(each.average)}
    assert wrong == pytest.approx(listed, abs=rounding / 2 + 1e-9)


def place(at, each):
    """ "Yi @2048 / SnapKV / Avg." as the row it names; None if it names something else."""
    head, _, rest = at.partition(" / ")
    group, _, budget = head.partition(" @")
    label = rest.rpartition(" / ")[0]
    found = [key for key in rows(each) if key[0] == group and key[2] == label and str(key[1]) in (budget, "None")]
    return found[0] if found else None


def test_groups_of_table_4_are_means_of_figure_33():
    """Both print ProtoKV on Mistral-7B at 256 tokens; one number of six does not fit."""
    short, long = recipe("protokv/table4"), recipe("protokv/figure33")
    whole = rows(long)["Mistral-7B", 256, "ProtoKV"]
    by_task = {column.points: whole[column.name] for column in long.columns}
    for column, number in rows(short)["Mistral-7B", 256, "ProtoKV"].items():
        right = [by_task[(point,)] for point in short.column(column).points]
        right = sum(right) / len(right)
        assert right == pytest.approx(53.38 if column == "Code" else number, abs=0.0101)


def test_the_same_setting_has_the_same_numbers_in_every_table():
    """IntentKV at 4,096 tokens on Llama-3.1: tables 1, 3, 4 and 8 (table 6 does not, and says so)."""
    places = {"table1": "IntentKV", "table3": "block 16", "table4": "IntentKV", "table8": "Full"}
    found = [rows(recipe(f"intentkv/{name}"))["Llama3.1", 4096, label] for name, label in places.items()]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("each", RECIPES, ids=by_name)
def test_a_recipe_says_what_it_shows_and_nothing_twice(each):
    assert each.shows and not each.shows.endswith(".")
    places = [(c.group, c.label, c.budget, c.column) for c in each.cells]
    assert len(set(places)) == len(places)
    assert each.kind == "measure" or bool(each.cells) == (each.kind == "scores")
    assert bool(each.command) == (each.kind == "measure")


@pytest.mark.parametrize("each", [each for each in RECIPES if each.kind == "measure"], ids=by_name)
@pytest.mark.parametrize("size", ["command", "small"])
def test_a_measurement_names_a_script_that_is_there(each, size, request):
    command = getattr(each, size)
    script = re.search(r"benchmarks/\w+\.py", command)
    options = [f"--{field.name}" for field in fields(BenchOptions)]
    known = (request.config.rootpath / script[0]).read_text() if script else options
    assert script or command.startswith("kvkeep bench ")
    assert all(option in known for option in re.findall(r"--\w+", command))
    asked = re.search(r"--methods ([^-]+)", command)
    for spec in re.split("[ ,]", asked[1].strip()) if asked else ():
        parse(spec)
    shape = re.search(r"--shape (\S+)", command)
    assert shape is None or shape[1] in SHAPES
    if size == "small":
        assert "cuda" not in command and "--model" not in command, "it runs on the default model, anywhere"
        assert command in run(each.name, small=True).output.replace("\n", " ")


@pytest.mark.parametrize("each", BOTH, ids=by_name)
def test_methods_parse_and_budgets_are_allowed(each):
    for cell in each.cells:
        budget = used(each, cell)
        assert (budget is None) == (cell.spec == "full")
        if cell.spec != "full":
            parse(cell.spec).check(budget)


@pytest.mark.parametrize("each", BOTH, ids=by_name)
def test_tasks_are_known_and_made_ones_have_a_length(each):
    for column in each.columns:
        assert column.points
        for task, length in column.points:
            assert task.partition("/")[0] in suite.names(), task
            folder, _, file = task.partition("/")
            known = {"longbench": longbench.TEMPLATES, "infinitebench": infinitebench.TEMPLATES}.get(folder, [file])
            assert file in known
            assert bool(length) == (task in suite.RULER or task in suite.MADE), task


@pytest.mark.parametrize("each", BOTH, ids=by_name)
def test_jobs_answer_every_number_and_nothing_twice(each):
    answered = [
        (job.group, task, length, method, budget)
        for job in jobs(each)
        for task in job.tasks
        for length in job.lengths or [None]
        for method in job.methods
        for budget in ([None] if method == "full" else job.budgets)
    ]
    asked = {
        (cell.group, *point, each.spec(cell, point[0]), used(each, cell))
        for cell in each.cells
        for point in each.column(cell.column).points
        if each.spec(cell, point[0])
    }
    assert set(answered) == asked
    assert len(set(answered)) == len(answered)


@pytest.mark.parametrize("each", SCORED, ids=by_name)
def test_small_variants_are_small(each):
    small = shrink(each)
    assert list(small.models.values()) == ["default"] and small.cells
    assert sum(job.answers for job in jobs(small)) * small.limit <= 80
    lengths = [length for job in jobs(small) for length in job.lengths]
    assert max(lengths or [0]) <= 2048
    assert small.max_length == 2048 or not any("/" in task for job in jobs(small) for task in job.tasks)


def test_a_task_may_have_a_method_of_its_own():
    each = recipe("intentkv/table2")
    cell = next(cell for cell in each.cells if cell.label == "IntentKV" and cell.column == "Avg.")
    assert each.spec(cell, "infinitebench/kv_retrieval") == "intentkv:block=128:boundary=first"
    assert each.spec(cell, "infinitebench/passkey") == "intentkv:boundary=first"


def test_an_unknown_name_answers_with_the_nearest():
    with pytest.raises(UnknownName, match="intentkv/table1"):
        recipe("intentkv/tabel1")


def test_the_data_is_part_of_the_package():
    held = {path.name for path in files("kvkeep.evaluate.recipes").iterdir()}
    assert {f"{paper}.yaml" for paper in PAPERS} <= held


def measured(task, method, budget, scores):
    facts = {"metric": "longbench", "kept_per_head": 1, "bytes": 1, "full_bytes": 1, "truncated": 0}
    place = {"task": task, "protocol": "aware", "method": method, "budget": budget}
    return [{**place, "score": score, **facts} for score in scores]


def test_a_number_is_the_mean_over_its_tasks():
    each = shrink(recipe("intentkv/table1"))
    tasks = [row_name(point) for point in each.column("8K").points]
    assert tasks == ["niah_single_1_1024", "fwe_1024"]
    scores = {tasks[0]: [1.0, 0.0], tasks[1]: [0.25, 0.5, 0.75]}
    found = [row for task, some in scores.items() for row in measured(task, "intentkv:boundary=first", 512, some)]
    lines = {(line.method, line.column): line for line in compare(each, {"Llama3.1": found})}
    line = lines["IntentKV", "8K"]
    assert (line.paper, line.ours, line.n, line.tasks) == (92.7, 50.0, 5, "")
    assert 0 <= line.low < 50 < line.high <= 100
    assert lines["SnapKV", "8K"].why == "no data"


def test_tasks_that_could_not_be_had_are_counted():
    each = shrink(recipe("intentkv/table1"))
    found = measured("fwe_1024", "full", None, [0.5, 0.5])
    line = next(line for line in compare(each, {"Llama3.1": found}) if (line.method, line.column) == ("FullKV", "8K"))
    assert (line.ours, line.tasks) == (50.0, "1 of 2 tasks")


def test_what_kvkeep_does_not_have_keeps_its_number():
    each = shrink(recipe("ahakv/table2"))
    each = replace(each, cells=(replace(each.cells[0], spec=None), *each.cells[1:]))
    line = compare(each, {})[0]
    assert line.paper == 30.26 and line.ours is None and line.why == "not in kvkeep"


def test_intervals_of_several_tasks_are_narrower_than_of_one_and_as_lopsided():
    one, *_ = summary.summarize(measured("a", "full", None, [0.2, 0.4, 0.9]))
    score, low, high = mean([one] * 4)
    assert score == pytest.approx(one.score)
    assert high - low == pytest.approx((one.high - one.low) / 2)
    none, *_ = summary.summarize(measured("a", "full", None, [0.0, 0.0, 0.0]))
    _, low, high = mean([none] * 2)
    assert low == 0 and high == pytest.approx(none.high / 2**0.5)


def run(name, **options):
    import typer

    app = typer.Typer()
    app.command()(lambda: command.reproduce(name, command.ReproduceOptions(**options)))
    return CliRunner().invoke(app, catch_exceptions=False)


def test_every_table_and_figure_is_listed_with_its_kind(capsys):
    command.print_names()
    shown = capsys.readouterr().out
    assert all(name in shown for name in names())
    assert all(f"\n{kind}" in shown for kind in command.KINDS.values()), "the list says what its kinds mean"


@pytest.mark.parametrize("each", RECIPES, ids=by_name)
def test_every_recipe_has_a_plan_and_runs_nothing(each, tmp_path):
    for small in (False, True):
        done = run(each.name, dry_run=True, small=small, out=str(tmp_path))
        assert done.exit_code == 0 and each.shows in done.output
    assert not list(tmp_path.iterdir())


def test_a_small_run_compares_and_goes_on_where_it_was(tmp_path, monkeypatch):
    loaded = []

    def load(name, **options):
        loaded.append(name)
        return tiny_chat.model(window=4096), tiny_chat.tokenizer()

    monkeypatch.setattr("kvkeep.model.load.load", load)
    monkeypatch.setattr("kvkeep.model.load.load_tokenizer", lambda name, say=None: tiny_chat.tokenizer())
    options = {"small": True, "out": str(tmp_path), "limit": 1}
    done = run("protokv/figure9", **options)
    assert done.exit_code == 0, done.output
    assert "At best the order" in done.output and loaded == ["default"]
    with (tmp_path / "comparison.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["method"], line["budget"], line["used"], line["paper"], line["n"]) for line in lines] == [
        ("SLM", "128", "64", "", "1"),  # drawn, not printed
        ("H2O", "128", "64", "", "1"),
        ("SnapKV", "128", "64", "94.2", "1"),
        ("ProtoKV", "128", "64", "97.3", "1"),
        ("ProtoKV, literal", "128", "64", "97.3", "1"),
    ]
    assert all(0 <= float(line["low"]) <= float(line["ours"]) <= float(line["high"]) <= 100 for line in lines)
    before = (tmp_path / "1-default" / "rows.jsonl").read_bytes()
    assert run("protokv/figure9", **options).stdout == done.stdout
    assert (tmp_path / "1-default" / "rows.jsonl").read_bytes() == before


def test_another_model_stands_beside_the_first_ones_numbers():
    done = run("intentkv/table1", dry_run=True, model="some/where")
    assert "some/where (for Llama3.1)" in done.output and "Yi" not in done.output.split("Note")[0]
    assert "only the order" in done.output


def test_what_is_no_experiment_says_so():
    assert "Not an experiment" in run("protokv/table7").output
    told = run("actqkv/table7").output
    assert "0.73" in told and "benchmarks/probe.py" in told


def test_small_windows_drop_something():
    """Where they have room for all that is left of a prompt, they are the full cache under another name."""
    for name in ("intelllm/table1", "intelllm/table2"):
        small = shrink(recipe(name))
        assert all(used(small, cell) < small.max_length for cell in small.cells if cell.spec != "full")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("intelllm/table1", "All but Full, which has the model's context length, 8K, get whole prompts"),
        *((f"actqkv/table{number}", "full context has the model's context length, 8K") for number in (1, 2, 3, 9)),
        *((f"ahakv/table{number}", "stay within the budget at every step") for number in (1, 2, 3)),
        ("intentkv/table1", "texts beyond 32K are read with a factor of 4"),
    ],
)
def test_a_recipe_says_where_it_differs_from_the_paper(name, words):
    assert words in " ".join(recipe(name).notes)


def test_measurements_ask_for_what_was_measured():
    assert recipe("intentkv/figure4").command.startswith("kvkeep bench")  # which has the full cache and memory
    assert "--max-new-tokens 71" in recipe("actqkv/table10").command


@pytest.mark.parametrize("name", ["intentkv/table2", "actqkv/table2"])
def test_small_recipes_answer_the_tasks_of_the_paper(name):
    whole, small = recipe(name), shrink(recipe(name))
    assert len(small.columns) == 3
    for column in small.columns:
        ((task, length),) = column.points
        assert whole.column(column.name).points == ((f"infinitebench/{task}", None),)
        assert comparison.row_name((task, length)) == f"{task}_{length}"
        for cell in (cell for cell in small.cells if cell.column == column.name):
            theirs = whole.spec(next(each for each in whole.cells if each.label == cell.label), f"infinitebench/{task}")
            assert small.spec(cell, task) == recipe(name).small.get("methods", {}).get(theirs, theirs)


LITERAL = {
    "intentkv": "boundary=first", "intelllm": "keep_head=False", "ahakv": "gain=multiply",
    "actqkv": "representatives=4", "protokv": "votes=raw",
}  # fmt: skip


@pytest.mark.parametrize("each", BOTH, ids=by_name)
def test_beside_every_row_of_the_papers_method_stands_the_papers_own_rule(each):
    paper = each.name.partition("/")[0]
    own = {}
    for cell in each.cells:
        if cell.spec.startswith(paper):
            label = cell.label.removesuffix(", literal").removesuffix(", subsequent")
            own.setdefault((cell.group, cell.budget, cell.column, label), []).append(cell)
    name, _, value = LITERAL[paper].partition("=")
    for (*_, label), cells in own.items():
        if label != "ProtoKV + HA":  # raw logits of several heads cannot be compared
            ours, beside = cells
            assert (ours.beside, beside.beside) == (False, True) and ours.number == beside.number
            assert ours.spec != beside.spec
            assert value in [str(dict(parse(cell.spec).parameters)[name]) for cell in cells]


def test_what_the_paper_does_not_print_is_run_beside_an_empty_cell():
    for name, label, tasks in (("intelllm/table1", "IntelLLM", 15), ("actqkv/table1", "Infinite", 15)):
        each = recipe(name)
        cells = [cell for cell in each.cells if cell.label == label and cell.column != each.average]
        assert len(cells) == tasks and any(cell.number is None for cell in cells)
        ran = {task for job in jobs(each) for task in job.tasks if cells[0].spec in job.methods}
        assert len(ran) == tasks
    masked = [cell.column for cell in recipe("intelllm/table3").cells if cell.label == "head 0, gap 4K"]
    assert masked == ["1-1"], "what the paper did not run is left alone"


def test_the_ablation_of_the_mask_keeps_the_same_first_tokens():
    each = recipe("intelllm/table3")
    assert each.beyond_window
    for cell in each.cells:
        method = parse(cell.spec)
        assert method.guard.sinks == (0 if cell.beside else 6)
        assert method.placement.gap == (6144 if "6K" in cell.label else 4096)


def test_only_texts_beyond_the_context_length_are_read_with_yarn():
    lengths = {(job.group, job.yarn): job.lengths for job in jobs(recipe("intentkv/table1"))}
    assert lengths["Qwen", None] == (4096, 8192, 16384, 32768) and lengths["Qwen", 4] == (65536, 131072)
    assert not any(yarn for group, yarn in lengths if group != "Qwen")
    assert "YaRN × 4" in run("intentkv/table1", dry_run=True).output
    assert "YaRN" not in run("intentkv/table1", dry_run=True, model="some/where").output.split("Note")[0]
    assert "some/where, YaRN × 2" in run("intentkv/table1", dry_run=True, model="some/where", yarn=2.0).output


def test_recipes_evict_from_answers_as_their_paper_does():
    each = recipe("ahakv/table1")
    asked = command._eval_options(each, jobs(each)[0], Path("out"), command.ReproduceOptions())
    assert asked.schedule == "own"
    assert "(schedule own)" in run("ahakv/table1", dry_run=True).output
    assert "(schedule own)" not in run("ahakv/table1", dry_run=True, schedule="prompt").output


def test_the_guide_says_of_which_kind_each_is(request):
    """Its table, number by number, is that of `--list`."""
    page = (request.config.rootpath / "docs/guides/reproducing-a-paper.md").read_text()
    line = r"^\| (\w+KV|IntelLLM) \| ([^|]*tables? [^|]+) \| ([^|]+) \| ([^|]+) \|$"
    found = {}
    for paper, *kinds in re.findall(line, page, re.M):
        for kind, text in zip(("scores", "measure", "facts"), kinds, strict=True):
            for what, numbers in re.findall(r"(table|figure)s? ([\d, –]+)", text):
                for first, last in re.findall(r"(\d+)(?:–(\d+))?", numbers):
                    for number in range(int(first), int(last or first) + 1):
                        found[recipe(f"{paper.lower()}/{what}{number}").name] = kind
    assert found == {each.name: each.kind for each in RECIPES if each.name != "intelllm/latency"}
