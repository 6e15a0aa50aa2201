"""Every score is the official one: 1,315 rows that the projects' own code has scored, and our own graders by hand."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvkeep.errors import KvkeepError, MissingExtra, UnknownName
from kvkeep.evaluate.metrics import METRICS, longbench
from kvkeep.evaluate.metrics.longbench import CATEGORIES, averages
from kvkeep.evaluate.metrics.math import aime_answer, extract_answer, last_box, math_answer
from kvkeep.evaluate.metrics.words import segment
from kvkeep.evaluate.recipes.recipe import recipe

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = {
    path.stem.removesuffix("_public"): json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*_public.json"))
}
ROWS = [pytest.param(family, row, id=row["id"]) for family, golden in GOLDEN.items() for row in golden["rows"]]
PREDICTION = ("prediction", "predictions", "loglikelihoods", "tokens")
REFERENCE = ("reference", "references", "label", "needle", "gold")


def score(name: str, row: dict):
    fields = dict(row)
    prediction = next(fields.pop(key) for key in PREDICTION if key in row)
    reference = next(fields.pop(key) for key in REFERENCE if key in row)
    return METRICS[name](prediction, reference, **fields)


@pytest.mark.parametrize("family, row", ROWS)
def test_the_official_value(family, row):
    if "raises" in row:
        with pytest.raises(KvkeepError):
            score(family, row)
    else:
        assert score(family, row) == pytest.approx(float(row["expected"]), rel=0, abs=1e-9)


def test_no_golden_row_is_missing():
    assert set(GOLDEN) <= set(METRICS)
    assert {name: len(golden["rows"]) for name, golden in GOLDEN.items()} == {n: g["count"] for n, g in GOLDEN.items()}
    assert len(GOLDEN) == 31 and len(ROWS) == 1276


@pytest.mark.parametrize("row", GOLDEN["longbench_code_sim"]["rows"], ids=lambda row: row["id"])
def test_code_similarity_with_the_other_back_end(row):
    assert score("longbench_code_sim_levenshtein", row) == row["expected_levenshtein_backend"]


@pytest.mark.parametrize("row", GOLDEN["lm_eval_multiple_choice"]["rows"], ids=lambda row: row["id"])
def test_normalised_accuracies(row):
    assert score("lm_eval_acc_norm", row) == row["acc_norm"]
    assert score("lm_eval_acc_bytes", row) == row["acc_bytes"]


def test_rouge_of_texts_that_repeat_themselves():
    """Sentences again and again, empty ones, dots and blanks in every place, as the packages score them."""
    rows = json.loads((FOLDER / "rouge_repeated.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 60
    for row in rows:
        text, needle = row["prediction"], row["needle"]
        assert METRICS["niah_kvcachefactory_rouge1"](text, needle) == pytest.approx(row["rouge1"], rel=0, abs=1e-12)
        if row["rouge_l"] is None:
            with pytest.raises(KvkeepError):
                METRICS["niah_kvpress_rouge"](text, needle)
        else:
            assert METRICS["niah_kvpress_rouge"](text, needle) == pytest.approx(row["rouge_l"], rel=0, abs=1e-12)


def test_rouge_gives_up_where_the_package_does():
    assert METRICS["longbench_rouge_l"]("w " * 990, "w " * 990) == pytest.approx(1, abs=1e-6)
    assert METRICS["longbench_rouge_l"]("w " * 1000, "w " * 1000) == 0
    with pytest.raises(KvkeepError, match="nothing but dots"):
        METRICS["niah_kvpress_rouge"]("", "a needle")


def test_a_reference_without_a_paragraph_is_named():
    with pytest.raises(KvkeepError, match="'Section 7' names no 'Paragraph'"):
        METRICS["longbench_retrieval"]("Paragraph 7", ["Section 7"])


def test_classes_are_asked_for():
    with pytest.raises(KvkeepError, match="give all_classes"):
        longbench.scorer(["City"], [["City"]], "trec")


def test_wrong_names_are_answered():
    with pytest.raises(UnknownName, match="longbench_rouge_l"):
        METRICS["longbench_rouge"]
    with pytest.raises(UnknownName, match="hotpotqa"):
        longbench.scorer(["x"], [["x"]], "hotpot_qa")


def test_without_jieba_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(MissingExtra, match=r"pip install kvkeep\[eval\]"):
        segment("北京")


def test_importing_metrics_is_light():
    heavy = ("torch", "transformers", "numpy", "sympy", "jieba")
    code = f"import sys, kvkeep.evaluate.metrics; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


SAME = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\frac12"),
    ("1/2", r"\dfrac{1}{2}"),
    ("0.3333", r"\frac{1}{3}"),
    (r"1\frac{4}{5}", r"\frac{9}{5}"),
    (r"-137 \frac{1}{2}", "-137.5"),
    ("1,234", "1234"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"\$18.90", "18.9"),
    ("−3", "-3"),
    (r"50\%", "50"),
    (r"90^\circ", "90"),
    (r"10 \text{ cm}", "10"),
    (r"15\mbox{ cm}^2", "15"),
    ("12 square inches", "12"),
    ("twenty-one", "21"),
    ("two hundred thousand", "200000"),
    ("x = 5", "5"),
    (r"x=3 \text{ or } x=-3", "-3, 3"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("5x-7y+4=0", "7y-5x-4=0"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
    (r"\frac{2\pi}{4}", r"\pi/2"),
    (r"\sqrt[3]{8}", "2"),
    (r"\sin^2 x", r"(\sin x)^2"),
    ("|{-3}|", "3"),
    ("6!", "720"),
    ("(1, 2)", "(1,2)"),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3,\pi/2)"),
    ("-2,1", "1,-2"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1/2\\2\end{bmatrix}"),
    ("(B)", "B"),
    ("B. seven", "B"),
    ("B", r"\text{(B)}"),
    (r"\text{Evelyn}", "evelyn"),
    ("4210_{5}", "4210_5"),
]
DIFFERENT = [
    ("5", "500"),
    ("0.5", "50"),
    ("12345", "12346"),
    ("100^2+1", "10000"),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    ("3.14159", r"\pi"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("1,2", "1,2,2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("east", "seat"),
    ("x+1", "y+1"),
    (r"\sqrt{x^2}", "x"),
    (r"x \le 5", r"5 \le x"),
    ("C", "B"),
    ("(a+5)(b+2)", r"\text{(B)}"),
    ("1/0", "2/0"),
    ("(", "7"),
]


@pytest.mark.parametrize("answer, reference", SAME)
def test_the_same_answer(answer, reference):
    assert math_answer(rf"so it is $\boxed{{{answer}}}$.", reference) == 1
    assert math_answer(rf"\boxed{{{reference}}}", rf"A solution, ending in \boxed{{{answer}}}.") == 1


@pytest.mark.parametrize("answer, reference", DIFFERENT)
def test_another_answer(answer, reference):
    assert math_answer(rf"\boxed{{{answer}}}", reference) == 0
    assert math_answer(rf"\boxed{{{reference}}}", answer) == 0


@pytest.mark.parametrize(
    "text, box, answer",
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", r"\{1, 2\}"),
        (r"\fbox{7}", "7", "7"),
        (r"\boxed{7} in the format \boxed{}", "7", "7"),
        (r"\boxed{7}, or rather \boxed{20", "7", "7"),
        ("The final answer is: $42$.", None, "$42$"),
        ("**Final Answer:** 204", None, "204"),
        ("so 204 minutes, and then she", None, None),
        (r"therefore \boxed{20", None, None),
        ("", None, None),
    ],
)
def test_where_the_answer_stands(text, box, answer):
    assert last_box(text) == box
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text, reference, right",
    [
        (r"\boxed{033}", "33", True),
        (r"\boxed{33}", 33, True),
        (r"\boxed{33}", "033", True),
        (r"\boxed{204 \text{ minutes}}", "204", True),
        (r"The answer is 204.", "204", True),
        (r"\boxed{33.5}", "33", False),
        (r"\boxed{3300}", "33", False),
        (r"33 it may be, but", "33", False),
        (r"\boxed{" + "9" * 5000 + "}", "33", False),
    ],
)
def test_aime(text, reference, right):
    assert aime_answer(text, reference) == right


@pytest.mark.parametrize(
    "hostile",
    [
        "__import__('os').system('true')",
        "9**9**9",
        "9^{9^{9^{9}}}",
        "170!!!",
        "(" * 290,
        "-" * 299 + "1",
        "1," * 149,
        "1 " + "m" * 280 + "!",
        "1 " + "cm " * 90 + "!",
        "9" * 100_000,
        "{" * 100_000,
        r"\boxed{" * 20_000,
        r"\frac" * 20_000,
        "answer is " * 10_000,
        " " * 100_000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_answers_are_wrong_and_quick(hostile):
    started = time.perf_counter()
    for text in (hostile, rf"\boxed{{{hostile}}}"):
        assert not math_answer(text, "x+12") and not aime_answer(text, "12")
        assert not METRICS["math_rkv_grader"](text, "x+12")
    assert time.perf_counter() - started < 3


def test_more_digits_than_an_integer_may_have():
    long = "9" * 5000
    score = METRICS["infinitebench"]
    assert score(f"1 {long}", ["[1, 2, 3, 4]"], dataset="math_calc") == 0.25
    assert score("01 2 3 5", ["[1, 2, 3, 4]"], dataset="math_calc") == 0.75
    assert score(long, ["[7]"], dataset="math_find") == 0.0
    assert score("it is 007", ["[7]"], dataset="math_find") == 1.0
    assert score("000", ["[0]"], dataset="math_find") == 1.0


def by_category(scores):
    return {task: score for tasks, score in zip(CATEGORIES.values(), scores, strict=True) for task in tasks}


def test_both_averages_of_longbench_are_those_printed():
    """ChatGLM3's category means are in LongBench's README, IntentKV prints 16 scores of Llama-3.1 and their mean."""
    found = averages(by_category([40.3, 46.6, 29.5, 68.1, 50.5, 56.2]))
    assert list(found) == ["LongBench, mean of 16 tasks", "LongBench, mean of 6 categories"]
    assert [round(number, 1) for number in found.values()] == [47.9, 48.5]
    table = recipe("intentkv/table10")
    full = {cell.column: cell.number for cell in table.cells if cell.label == "FullKV"}
    tasks = {column.points[0][0].rpartition("/")[2]: full[column.name] for column in table.columns[:-1]}
    assert sum(tasks.values()) == pytest.approx(785.8)
    assert round(averages(tasks)["LongBench, mean of 16 tasks"], 1) == full[table.average] == 49.1


def test_averages_say_of_how_many_tasks_they_are():
    scores = {"qasper_e": 10.0, "multifieldqa_en_e": 20.0, "lcc_e": 60.0, "trec": 1.0, "vcsum": 5.0}
    assert averages(scores) == {"LongBench-E, mean of 3 tasks": 30.0, "LongBench-E, mean of 2 categories": 37.5}
    assert averages({}) == {}
