"""Tasks: the official words, to the letter, and every fault of a file named by its line."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_chat

from kvkeep.errors import BadInput, BadParameter, UnknownName
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.tasks import choice, infinitebench, longbench, needle
from kvkeep.evaluate.tasks.build import fill

ROOT = Path(__file__).parents[2]
SHARED = next((place for place in (ROOT / "shared", ROOT.parent / "shared") if place.is_dir()), ROOT / "shared")
BRACES = 'data with {braces}, {input}, {context} and "quotes" '

golden = pytest.mark.skipif(not (SHARED / "golden").is_dir(), reason="the official templates are not on this machine")
real = pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the benchmark's data are not on this machine")


def prompt(sample):
    return sample.context + sample.question + sample.prefix


def score(sample, prediction):
    return METRICS[sample.metric](prediction, list(sample.references), **sample.extra)


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def official(name):
    return json.loads((SHARED / "golden" / name).read_text(encoding="utf-8"))


def digest(templates, parts):
    whole = {task: ["".join(t[part] for part in parts), t["max_new_tokens"]] for task, t in templates.items()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def test_no_letter_of_a_template_has_changed():
    """Digests of dataset2prompt.json with dataset2maxlen.json, and of InfiniteBench's yarn_mistral with its limits."""
    assert digest(longbench.TEMPLATES, ["context", "question"]).startswith("f4d47e2f19524f3a")
    assert digest(infinitebench.TEMPLATES, ["context", "question", "prefix"]).startswith("0a1ad09ebdf5cb78")


# LongBench


def row(task, **changes):
    end = {"trec": "Type:", "triviaqa": "Answer:\n", "samsum": "Summary: ", "lsht": "类别："}.get(task, "")
    start = longbench.TEMPLATES[task].get("input_starts", "")
    return {
        "context": f"{start} {BRACES}1\n\n{start} {BRACES}2",
        "input": f"{start} {BRACES}3\n{end}",
        "answers": ["Paragraph 7, 段落7"],
        "all_classes": ["Paragraph 7, 段落7", "Paragraph 8"] if task in ("trec", "lsht") else None,
        "length": 4321,
        "dataset": task,
        "language": "en",
        "_id": "a1",
        **changes,
    }


@golden
@pytest.mark.parametrize("task", longbench.TEMPLATES)
def test_longbench_is_the_official_prompt(task, tmp_path):
    record = row(task)
    template = official("longbench/dataset2prompt.json")[task]
    head, _, rest = template.partition("{context}")
    middle, asked, tail = rest.partition("{input}")
    expected = head + record["context"] + middle + (record["input"] if asked else "") + tail
    (made,) = longbench.longbench(written(tmp_path / f"{task}.jsonl", record))
    assert prompt(made) == expected and not made.prefix and record["context"] in made.context
    assert made.max_new_tokens == official("longbench/dataset2maxlen.json")[task]
    assert (made.task, made.id, made.extra["length"]) == (task, "a1", 4321)


@golden
@pytest.mark.parametrize("task", sorted(set(longbench.TEMPLATES) - {"trec", "triviaqa", "samsum", "lsht"}))
def test_the_context_ends_where_that_of_kvpress_does(task, tmp_path):
    (made,) = longbench.longbench(written(tmp_path / "x.jsonl", row(task)))
    split = official("longbench/kvpress_split.json")
    assert made.question.endswith(split["answer_prefix"][task])
    assert made.context == split["context_prefix"][task].replace("{context}", row(task)["context"])


@pytest.mark.parametrize("task", longbench.TEMPLATES)
def test_a_longbench_prompt_is_taken_apart_again(task, tmp_path):
    (made,) = longbench.longbench(written(tmp_path / "x.jsonl", row(task)))
    filled = {"prompt": prompt(made), "answers": ["x"], "all_classes": ["x"], "dataset": task, "idx": 5}
    (again,) = longbench.longbench(written(tmp_path / "y.jsonl", filled))
    assert prompt(again) == prompt(made) and again.id == "5" and "length" not in again.extra
    if task != "repobench-p":  # nothing stands between its two fields
        assert (again.context, again.question) == (made.context, made.question)
    else:
        assert again.question == "Next line of code:\n"


def in_words_of_opencompass(sample):
    """The prompt as the files of MiniLongBench have it: three tasks are worded differently there."""
    if sample.task == "qasper":
        head, tail = longbench.TEMPLATES["qasper"]["context"].split("{context}")
        fields = {"context": sample.context[len(head) : -len(tail)], "input": sample.question[10:-9]}
        return fill(longbench.TEMPLATES["hotpotqa"]["context"] + longbench.TEMPLATES["hotpotqa"]["question"], fields)
    if sample.task == "narrativeqa":
        return prompt(sample).replace("asconcisely", "as concisely")
    return prompt(sample) + "\n" * (sample.task == "multi_news")


@real
@pytest.mark.parametrize("task", longbench.TEMPLATES)
def test_longbench_on_real_rows(task):
    path = SHARED / "data" / "longbench" / f"{task}.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for sample, record in zip(longbench.longbench(path), records, strict=True):
        assert in_words_of_opencompass(sample) == record["prompt"]
        assert list(sample.references) == record["answers"] and score(sample, record["answers"][0]) > 0.99
        start = longbench.TEMPLATES[task].get("input_starts", "")
        assert sample.question.startswith(start) and sample.question.count(f"\n{start}" if start else "\0") == 0


def test_longbench_is_asked_as_officially(tmp_path):
    made = {
        task: longbench.longbench(written(tmp_path / f"{task}.jsonl", row(task)))[0] for task in longbench.TEMPLATES
    }
    plain = {task for task, sample in made.items() if not sample.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {task: sample.stops for task, sample in made.items() if sample.stops} == {"samsum": ("\n",)}
    assert len(made) == 21 and len(longbench.ENGLISH) == 16 and len(longbench.LONGBENCH_E) == 13
    assert not [task for task in longbench.ENGLISH if not longbench.TEMPLATES[task]["context"].isascii()]


@pytest.mark.parametrize("task", longbench.TEMPLATES)
def test_longbench_scores(task, tmp_path):
    (made,) = longbench.longbench(written(tmp_path / "x.jsonl", row(task)))
    right = "7" if "passage" in task else made.references[0]
    if task == "passage_count":
        (made,) = longbench.longbench(written(tmp_path / "x.jsonl", row(task, answers=["7"])))
    assert score(made, right) > 0.99 and score(made, "?!") == 0
    first_line = score(made, f"\n\n{right}\nParagraph 8 and more 8")
    assert (
        first_line > 0.99 if task in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p") else first_line < 0.9
    )


def test_longbench_e_goes_by_length(tmp_path):
    (made,) = longbench.longbench(written(tmp_path / "qasper_e.jsonl", row("qasper")))
    assert (made.task, made.extra["dataset"], made.extra["length"]) == ("qasper_e", "qasper", 4321)
    with pytest.raises(BadInput, match="qasper_e.jsonl, line 1 has no length"):
        longbench.longbench(written(tmp_path / "qasper_e.jsonl", row("qasper", length=None)))


LONGBENCH_FAULTS = [
    ([row("qasper"), row("qasper")], "line 2 has the id 'a1' of x.jsonl, line 1"),
    ([row("qasper", context=" ")], "line 1 has no context"),
    ([{**row("qasper"), "input": None}], "line 1 has no input"),
    ([row("qasper", answers=[])], "line 1 has no list of texts in 'answers'"),
    ([row("qasper", answers="yes")], "'yes'"),
    ([row("trec", all_classes=None)], "line 1 has no list of texts in 'all_classes'"),
    ([row("qasper", dataset="qaspar")], "no LongBench task is called 'qaspar'. Did you mean 'qasper'?"),
    ([{"prompt": "Answer me: who?", "answers": ["I"], "dataset": "qasper"}], "not in the words of 'qasper'"),
    ([], "has no samples"),
]


@pytest.mark.parametrize("records, fault", LONGBENCH_FAULTS, ids=[fault for _, fault in LONGBENCH_FAULTS])
def test_faults_of_longbench_files(records, fault, tmp_path):
    with pytest.raises(BadInput, match=re.escape(fault)):
        longbench.longbench(written(tmp_path / "x.jsonl", *records))


@pytest.mark.parametrize("read", [longbench.longbench, choice.arc_easy, choice.wic], ids=lambda read: read.__name__)
def test_a_line_that_is_not_json(read, tmp_path):
    (tmp_path / "x.jsonl").write_text("\n{'a': 1}\n")
    with pytest.raises(BadInput, match="x.jsonl, line 2 is not JSON"):
        read(tmp_path / "x.jsonl")
    with pytest.raises(BadInput, match="none.jsonl' cannot be read"):
        read(tmp_path / "none.jsonl")


# InfiniteBench

OPTIONS = ["get_name", "set_name", "load", "dump"]
INFINITE = {  # input, answer, references, a right answer, a wrong one
    "passkey": ("What is the pass key?", "71432", ("71432",), "71432.", "7143"),
    "number_string": ("What is the sequence of digits?", ["1122334455"], ("1122334455",), " 1122334455", "112233445"),
    "kv_retrieval": ('Key: "ab"\nThe value is: ', ["cd-ef"], ("cd-ef",), ' "cd-ef"', "cd"),
    "longbook_sum_eng": ("", ["A short tale"], ("A short tale",), "a short tale", "other"),
    "longbook_choice_eng": ("Who?", ["load"], ("load", "C"), "C. load", "B"),
    "longbook_qa_eng": ("Who?", ["Ann", "Anna"], ("Ann", "Anna"), "anna", "Bert"),
    "longbook_qa_chn": ("谁？", ["王五"], ("王五",), "王五。", "李"),
    "longdialogue_qa_eng": ("", ["ANNA", "ANN"], ("ANNA", "ANN"), "anna.", "ann"),
    "math_find": ("The second largest number of the list is:", 71, ("71",), "71", "7.5"),
    "math_calc": ("", [1, -4, 8], ("[1, -4, 8]",), "[1, 4, 8]", "2"),
    "code_run": ("What is func_3(-7)?", [-12], ("-12",), "It returns -12", "12"),
    "code_debug": ("", "set_name", ("set_name", "B"), "B. set_name", "B"),
}


def book(task, **changes):
    record = {"id": 3, "context": BRACES, "input": INFINITE[task][0], "answer": INFINITE[task][1], "options": OPTIONS}
    return {**record, **changes}


def test_every_task_of_infinitebench_is_tested():
    assert set(INFINITE) == set(infinitebench.TEMPLATES) and len(INFINITE) == 12


@golden
@pytest.mark.parametrize("task", INFINITE)
def test_infinitebench_is_the_official_prompt(task, tmp_path):
    (made,) = infinitebench.infinitebench(written(tmp_path / f"{task}.jsonl", book(task)))
    data = official("infinitebench/prompts.json")
    asked = INFINITE[task][0]
    fields = {"context": BRACES, "input": asked, "question": asked, "func": "func_3", "func_call": "func_3(-7)"}
    fields |= {f"OPTION_{letter}": option for letter, option in zip("ABCD", OPTIONS, strict=True)}
    fields["prefix"] = "What is the second largest number in the following list?"
    assert prompt(made) == data["yarn_mistral (default for local models)"][task].format(**fields)
    assert made.max_new_tokens == data["max_new_tokens"][task]


@pytest.mark.parametrize("task", INFINITE)
def test_infinitebench_scores(task, tmp_path):
    (made,) = infinitebench.infinitebench(written(tmp_path / f"{task}.jsonl", book(task)))
    _, _, references, right, wrong = INFINITE[task]
    assert (made.id, made.references, made.chat) == ("3", references, False)
    assert score(made, right) == pytest.approx(1 if task != "math_calc" else 1 / 3) and score(made, wrong) < 0.7


INFINITE_FAULTS = [
    ("passkey", [book("passkey"), book("passkey")], "line 2 has the id '3' of passkey.jsonl, line 1"),
    ("passkey", [book("passkey", input="")], "line 1 has no input or question"),
    ("passkey", [book("passkey", answer=None)], "line 1 has no answer"),
    ("passkey", [], "has no samples"),
    ("math_find", [book("math_find", input="Which?")], "'Which?' does not say what is asked"),
    ("math_find", [book("math_find", answer=["many"])], "math_find has a number for an answer, not 'many'"),
    ("math_calc", [book("math_calc", answer=[])], "a list of whole numbers for an answer"),
    ("code_run", [book("code_run", answer=1.5)], "a whole number for an answer, not '1.5'"),
    ("code_run", [book("code_run", input="call it")], "does not say what is asked"),
    ("code_debug", [book("code_debug", options=["a", "b"])], "line 1 has 2 options"),
    ("code_debug", [book("code_debug", answer="run")], "'run' is none of the four options"),
    ("pass_key", [book("passkey")], "no InfiniteBench task is called 'pass_key'. Did you mean 'passkey'?"),
]


@pytest.mark.parametrize("task, records, fault", INFINITE_FAULTS, ids=[fault for *_, fault in INFINITE_FAULTS])
def test_faults_of_infinitebench_files(task, records, fault, tmp_path):
    with pytest.raises(BadInput, match=re.escape(fault)):
        infinitebench.infinitebench(written(tmp_path / f"{task}.jsonl", *records))


def test_labels_may_be_wrapped_or_texts(tmp_path):
    for task, answer in (("math_calc", [[1, -4, 8]]), ("math_find", "71"), ("code_debug", ["set_name", "B"])):
        (made,) = infinitebench.infinitebench(written(tmp_path / "x.jsonl", book(task, answer=answer)), task)
        assert made.references == INFINITE[task][2]


@pytest.mark.parametrize("task, digits", [("passkey", 5), ("number_string", 10)])
def test_numbers_in_noise(task, digits):
    made = infinitebench.sized(task, 600, tiny_chat.tokenizer(), 5)
    assert len(made) == 5 and len({sample.id for sample in made}) == 5
    for number, sample in enumerate(made):
        (key,) = sample.references
        assert len(key) == digits and key.isdecimal() and sample.context.count(key) == 2
        assert score(sample, f"{key}.") == 1
        before = sample.context.partition("The pass key" if digits == 5 else "The sequence")[0]
        lines = sample.context.count(infinitebench.NOISE)
        assert before.count(infinitebench.NOISE) == int((2 * number + 1) / 10 * lines)
    if digits == 10:  # half of them repeat the digit beside them
        assert all(sum(a == b for a, b in zip(k, k[1:], strict=False)) >= 5 for k in (s.references[0] for s in made))
    assert infinitebench.sized(task, 600, tiny_chat.tokenizer(), 5) == made
    assert infinitebench.sized(task, 600, tiny_chat.tokenizer(), 5, seed=1) != made


def test_values_of_keys():
    made = infinitebench.sized("kv_retrieval", 2000, tiny_chat.tokenizer(), 4)
    for number, sample in enumerate(made):
        data = json.loads(re.search(r"\{.*\}", sample.context)[0])
        key = re.search('Key: "(.+)"', sample.question)[1]
        place = int((2 * number + 1) / 8 * len(data))
        assert list(data).index(key) == place and sample.references == (data[key],)
        assert score(sample, f' "{data[key]}"') == 1 and score(sample, key) == 0
    assert infinitebench.sized("kv_retrieval", 2000, tiny_chat.tokenizer(), 4) == made


# needle in a haystack


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text, add_special_tokens, verbose):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def essays(tmp_path):
    (tmp_path / "b.txt").write_text("Bees hum. " * 30)
    (tmp_path / "a.txt").write_text("An ant walks over the hill.\nIt sleeps. " * 30)
    (tmp_path / "c.md").write_text("not an essay")
    return tmp_path


def test_needles_stand_where_a_sentence_ends(letters, essays):
    made = needle.needle(letters, (700, 1500), (0, 30, 75.5, 100), essays)
    assert [sample.id for sample in made] == [f"{n}-{d}" for n in (700, 1500) for d in ("0", "30", "75.5", "100")]
    hidden = needle.NEEDLES["sandwich"].hidden
    for sample in made:
        text = sample.context.removeprefix(needle.BEFORE).removesuffix(needle.AFTER)
        length, depth = sample.extra["length"], sample.extra["depth"]
        before, found, after = text.partition(hidden)
        assert found and len(text) == length - needle.BUFFER and text.startswith("An ant" if depth else hidden)
        straw = before + after
        assert straw == ("".join((essays / name).read_text() for name in ("a.txt", "b.txt")) * 9)[: len(straw)]
        if 0 < depth < 100:
            wanted = int(len(straw) * depth / 100)
            assert before == straw[:wanted][: straw[:wanted].rindex(".") + 1]
        assert (after == "") == (depth == 100)
        assert sample.question.endswith("Question: What is the best thing to do in San Francisco?\nAnswer:")
        said = "Eat a sandwich and sit in Dolores Park on a sunny day."
        assert sample.chat and score(sample, said) == 1 and score(sample, "Play chess") == 0


def test_a_number_of_seven_digits_in_noise(letters):
    made = needle.needle(letters, (1000,), kind="number")
    numbers = [sample.references[0] for sample in made]
    assert [sample.extra["depth"] for sample in made] == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
    assert len(set(numbers)) == 10 and all(len(n) == 7 and n.isdecimal() for n in numbers)
    for sample, number in zip(made, numbers, strict=True):
        assert sample.context.count(number) == 1 and infinitebench.NOISE in sample.context
        assert score(sample, f"The special magic number is {number}.") == 1 and score(sample, "1234567") == 0
    assert made == needle.needle(letters, (1000,), kind="number")
    assert numbers != [s.references[0] for s in needle.needle(letters, (1000,), kind="number", seed=1)]


def test_faults_of_a_needle_grid(letters, tmp_path):
    for wrong in ({"lengths": ()}, {"depths": (5, 5)}, {"depths": (101,)}, {"lengths": (250,)}):
        with pytest.raises(BadParameter, match="lengths|depths|length=250"):
            needle.needle(letters, **{"lengths": (600,), **wrong})
    with pytest.raises(BadInput, match=r"has no text in \*.txt"):
        needle.needle(letters, (600,), folder=tmp_path)
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BadInput, match="cannot be read as UTF-8"):
        needle.needle(letters, (600,), folder=tmp_path)
    with pytest.raises(UnknownName, match="no needle named 'pin'"):
        needle.needle(letters, (600,), kind="pin")


@real
def test_needles_in_real_essays(letters):
    (made,) = needle.needle(letters, (5000,), (50,), SHARED / "data" / "needle")
    before = made.context.partition(needle.NEEDLES["sandwich"].hidden)[0]
    assert before.endswith(".") and 2000 < len(before) < 2500


# multiple choice

ARC = {"id": "x", "question": "Why?", "choices": {"text": ["so", "because"], "label": ["1", "2"]}, "answerKey": "2"}
OPENBOOK = {"id": "x", "question_stem": "Ice is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}}
WIC = {"idx": 0, "sentence1": "A class act.", "sentence2": "No class.", "start1": 2, "end1": 7, "label": "true"}
WINOGRANDE = {"sentence": "Ann beat Eve as _ was fast.", "option1": "Ann", "option2": "Eve", "answer": "1"}


def one(read, record, tmp_path):
    (made,) = read(written(tmp_path / "x.jsonl", record))
    return made


def test_arc_and_openbook(tmp_path):
    arc = one(choice.arc_easy, ARC, tmp_path)
    assert choice.pairs(arc) == [("Question: Why?\nAnswer:", " so"), ("Question: Why?\nAnswer:", " because")]
    assert (arc.id, arc.references, arc.choices, arc.chat) == ("x", (" because",), (" so", " because"), False)
    book = one(choice.openbookqa, {**OPENBOOK, "answerKey": " B"}, tmp_path)
    assert choice.pairs(book) == [("Ice is", " hot"), ("Ice is", " cold")] and book.extra["gold"] == 1


@pytest.mark.parametrize("label, gold", [("false", 0), ("true", 1), (False, 0), (True, 1), (0, 0), (1, 1)])
def test_wic(label, gold, tmp_path):
    made = one(choice.wic, {**WIC, "label": label}, tmp_path)
    asked = (
        "Sentence 1: A class act.\nSentence 2: No class.\nQuestion: Is the word 'class' used in the same way in the "
        "two sentences above?\nAnswer:"
    )
    assert choice.pairs(made) == [(asked, " no"), (asked, " yes")]
    assert made.extra["gold"] == gold and made.references == ((" no", " yes")[gold],)


def test_winogrande_has_two_contexts_and_one_continuation(tmp_path):
    made = one(choice.winogrande, WINOGRANDE, tmp_path)
    assert choice.pairs(made) == [("Ann beat Eve as Ann", " was fast."), ("Ann beat Eve as Eve", " was fast.")]
    assert (
        METRICS[made.metric]([-2.0, -1.0], **made.extra) == 0 and METRICS[made.metric]([-1.0, -2.0], **made.extra) == 1
    )


def test_blanks_before_a_choice_belong_to_it(tmp_path):
    made = one(choice.openbookqa, {**OPENBOOK, "question_stem": "Ice is  ", "answerKey": "A"}, tmp_path)
    assert choice.pairs(made)[0] == ("Ice is", "   hot")


def test_choices_are_scored_as_in_lm_eval(tmp_path):
    made = one(choice.arc_easy, ARC, tmp_path)
    likely = [-4.0, -5.0]  # "because" is longer, so it is likelier by the letter
    assert METRICS[made.metric](likely, **made.extra) == 0 and METRICS["lm_eval_acc_norm"](likely, **made.extra) == 1


CHOICE_FAULTS = [
    (choice.arc_easy, [ARC, ARC], "line 2 has the id 'x' of x.jsonl, line 1"),
    (choice.arc_easy, [{**ARC, "answerKey": "5"}], "line 1: the answer '5' is none of 2 choices (1, 2)"),
    (choice.arc_easy, [{**ARC, "choices": ["so"]}], "line 1 has no choices with their text and label"),
    (choice.arc_easy, [{**ARC, "question": None}], "line 1 has no question"),
    (choice.openbookqa, [OPENBOOK], "line 1 has no answerKey"),
    (choice.wic, [{**WIC, "end1": 99}], "start1=2 and end1=99 mark no word"),
    (choice.wic, [{**WIC, "label": "maybe"}], "the label 'maybe' is neither"),
    (choice.winogrande, [{**WINOGRANDE, "sentence": "No gap."}], "needs a sentence with a blank"),
    (choice.winogrande, [{**WINOGRANDE, "answer": ""}], "line 1 has no answer"),
    (choice.winogrande, [], "has no samples"),
]


@pytest.mark.parametrize("read, records, fault", CHOICE_FAULTS, ids=[fault for *_, fault in CHOICE_FAULTS])
def test_faults_of_choice_files(read, records, fault, tmp_path):
    with pytest.raises(BadInput, match=re.escape(fault)):
        read(written(tmp_path / "x.jsonl", *records))


@real
@pytest.mark.parametrize("name, count", [("arc_easy", 570), ("openbookqa", 500), ("wic", 500), ("winogrande", 1267)])
def test_choices_of_real_files(name, count):
    made = getattr(choice, name)(SHARED / "data" / "short" / f"{name}.jsonl")
    assert len(made) == count
    for sample in made:
        assert len(sample.choices) >= 2 and sample.choices[sample.extra["gold"]] == sample.references[0]
        assert all(read and scored.startswith(" ") for read, scored in choice.pairs(sample))
