"""RULER's thirteen tasks: 130 samples as the official generators made them, and what holds for all."""

import hashlib
import importlib.util
import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import tiny_chat

from kvkeep.errors import BadInput, BadParameter, MissingExtra, UnknownName
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.tasks.ruler import TASKS, ruler, unavailable, vocabulary
from kvkeep.evaluate.tasks.ruler.niah import Essays, sentences, splitter
from kvkeep.evaluate.tasks.ruler.vocabulary import Pairs
from kvkeep.evaluate.tasks.ruler.words import ZETA

HERE = Path(__file__).parents[1]
GOLDEN = HERE / "golden" / "ruler_generator"
ROWS = json.loads((GOLDEN / "ruler_generator_public.json").read_text(encoding="utf-8"))["rows"]
ESSAYS = HERE.parents[1] / "shared" / "data" / "needle"
ESSAY_TASKS = [name for name, task in TASKS.items() if task.needs == "haystack"]
WORDY = [name for name, task in TASKS.items() if task.needs_words]
FILES = {"squad": GOLDEN / "mini_squad.json", "hotpotqa": GOLDEN / "mini_hotpotqa.json"}


class Words:
    """The tokenizer the golden samples were made with."""

    def encode(self, text: str) -> list[str]:
        return re.findall(r"\w+|[^\w\s]", text)


@pytest.fixture(scope="module")
def essay(tmp_path_factory) -> Path:
    """3,000 words, so that longer haystacks begin again."""
    rng = random.Random(0)
    lines = [
        rng.choices(["ships", "carry", "letters", "over", "grey", "water", "at", "night"], k=12) for _ in range(250)
    ]
    text = "\n".join(f"{' '.join(line).capitalize()}." for line in lines)
    path = tmp_path_factory.mktemp("essays") / "essay.txt"
    path.write_text(text)
    return path


def need_words(task: str) -> None:
    """Another version draws other words, and has to be noticed."""
    if task in WORDY and not vocabulary.installed():
        pytest.skip("wonderwords is not installed")


def make(task: str, length: int, essay: Path, samples: int = 4, **options):
    need_words(task)
    return ruler(task, length, Words(), samples, haystack=essay, **{**FILES, **options})


def prompt(sample) -> str:
    return sample.context + sample.question + sample.prefix


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['task']}-{row['max_seq_length']}")
def test_the_official_samples(row):
    need_words(row["task"])
    if row["task"] in ESSAY_TASKS and not ESSAYS.is_dir():
        pytest.skip("the essays (shared/data/needle) are not here")
    if row["task"] in ESSAY_TASKS and splitter()[0] == "plain":
        pytest.skip("NLTK with its punkt_tab data is not installed; llama-index-core's wheel has the data")
    samples = ruler(
        row["task"], row["max_seq_length"], Words(), row["num_samples"], row["random_seed"], haystack=ESSAYS, **FILES
    )
    assert len(samples) == len(row["samples"])
    for sample, official in zip(samples, row["samples"], strict=True):
        text = sample.context + sample.question
        assert list(sample.references) == official["outputs"]
        assert sample.prefix == official["answer_prefix"]
        assert sample.extra["length"] == official["length"]
        assert len(text) == official["input_chars"]
        assert hashlib.sha256(text.encode()).hexdigest() == official["input_sha256"]
        if "token_position_answer" in official:
            offset = sample.extra["offset"]
            assert offset == official["index_field"]
            assert len(Words().encode(text[:offset])) == official["token_position_answer"]


def test_the_tasks_are_the_official_ones():
    assert Counter(task.max_new_tokens for task in TASKS.values()) == {128: 8, 32: 2, 30: 1, 120: 1, 50: 1}
    assert {name for name, task in TASKS.items() if task.metric.endswith("part")} == {"qa_1", "qa_2"}
    assert {row["task"] for row in ROWS} == set(TASKS)


# tokens that one step of its search is worth, below 4096 tokens and from there on
STEP = {"noise": (5 * 26, 25 * 26), "needles": (5 * 28, 25 * 28), "essay": (500 * 1.1, 500 * 1.1)}
STEP |= {"vt": (5 * 26, 10 * 26), "cwe": (10 * 4, 30 * 4), "qa_1": (10 * 75, 10 * 75), "qa_2": (10 * 80, 10 * 80)}


@pytest.mark.parametrize("length", [1024, 1500, 4095, 4096, 6001])
@pytest.mark.parametrize("task", TASKS)
def test_a_length_is_filled_and_never_exceeded(task, length, essay):
    haystack = getattr(TASKS[task].draw, "keywords", {}).get("haystack", "")
    step = STEP.get(task, STEP.get(haystack, (length / 10,) * 2))[length >= 4096]
    for sample in make(task, length, essay):
        tokens = len(Words().encode(prompt(sample))) + TASKS[task].max_new_tokens
        assert tokens == sample.extra["length"]
        assert length - step * 1.25 < tokens <= length


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_is_in_the_context(task, essay):
    for sample in make(task, 2048, essay):
        assert sample.references
        for reference in sample.references:
            assert reference in sample.context
        assert METRICS[sample.metric](" ".join(sample.references), sample.references) == 100
        assert METRICS[sample.metric]("", sample.references) == 0
        assert sample.max_new_tokens == TASKS[task].max_new_tokens


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides(task, essay):
    first, again, other = (make(task, 1500, essay, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [prompt(s) for s in first] != [prompt(s) for s in other]
    assert len({prompt(s) for s in first}) == len({s.id for s in first}) == len(first)


@pytest.mark.parametrize("task", TASKS)
def test_the_question_is_apart_from_the_context(task, essay):
    for sample in make(task, 1500, essay):
        assert sample.context.endswith("\n")
        assert sample.question.startswith(("What ", "Question: ", "Answer the question "))
        assert sample.prefix.startswith(" ")
        if task.startswith("niah"):
            key = re.search(r"for (.+) mentioned", sample.question)[1]
            assert all(part in sample.context for part in re.split(r",? and |, ", key))


@pytest.mark.parametrize("task", TASKS)
def test_a_reserve_is_kept_free(task, essay):
    for sample in make(task, 2048, essay, reserve=100):
        assert sample.extra["length"] <= 1948


@pytest.mark.parametrize("task", TASKS)
def test_too_small_a_length_says_what_is_needed(task, essay):
    with pytest.raises(BadParameter, match="length=20 "):
        make(task, 20, essay)
    with pytest.raises(BadParameter, match=rf"length=201 cannot hold {task}: .* \d+ tokens"):
        make(task, 201, essay)


@pytest.mark.parametrize("task", TASKS)
def test_the_length_an_error_names_is_enough(task, essay):
    with pytest.raises(BadParameter) as caught:
        make(task, 201, essay, samples=2)
    needed = int(re.search(r"take (\d+) tokens", str(caught.value))[1])
    assert len(make(task, needed, essay, samples=2)) == 2


def test_a_tokenizer_of_transformers_counts_without_its_special_tokens(essay):
    tokenizer = tiny_chat.tokenizer()
    for task in ("niah_multikey_3", "vt", "fwe"):
        for sample in ruler(task, 3000, tokenizer, 2):
            assert sample.extra["length"] == len(prompt(sample)) + sample.max_new_tokens <= 3000


def test_a_tokenizer_must_encode():
    with pytest.raises(BadParameter, match="str cannot count"):
        ruler("fwe", 1024, "gpt2", 1)


def test_words_are_as_common_as_they_should_be(essay):
    for length, often, seldom in ((2048, 6, 1), (4096, 30, 3)):
        for sample in make("cwe", length, essay):
            listed = sample.context.rpartition("most often.\n")[2]
            counts = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", listed))
            assert {counts.pop(word) for word in sample.references} == {often}
            assert set(counts.values()) == {seldom}


def test_the_three_most_frequent_words_are_asked_for(essay):
    for sample in make("fwe", 4096, essay):
        counts = Counter(re.findall(r"\b[a-z]{6}\b", sample.context.partition("coded words. ")[2]))
        assert [word for word, _ in counts.most_common(3)] == list(sample.references)


def test_a_chain_leads_from_the_value_to_every_name(essay):
    for sample in make("vt", 2048, essay):
        value = re.search(r"value (\d+) ", sample.question)[1]
        lines = sample.context.rpartition("following text.\n\n")[2].split("\n")
        known = []
        for line in lines:
            if match := re.fullmatch(r"VAR (\w+) = (?:VAR (\w+) |(\d+))", line):
                assert match[3] == value if not known else match[2] == known[-1]
                known.append(match[1])
        assert known == list(sample.references) and len(set(known)) == 5


def test_words_beyond_the_list_are_not_drawn(monkeypatch):
    monkeypatch.setattr(vocabulary, "words", lambda kind: tuple(f"{kind}{n}" for n in range(1500)))
    monkeypatch.setattr(vocabulary, "version", lambda: "fake")
    (sample,) = ruler("cwe", 100_000, Words(), 1)
    assert sample.extra["capped"] and sample.extra["length"] < 60_000


def test_a_question_keeps_its_own_documents(essay):
    entries = json.loads(FILES["hotpotqa"].read_text())
    for length in (1024, 4096, 60_000):  # the last has room for every document, and more than once
        for sample, entry in zip(make("qa_2", length, essay), entries, strict=False):
            assert entry["question"] in sample.question
            for title, parts in entry["context"]:
                assert f":\n{title}\n{''.join(parts)}\n\n" in sample.context


def test_the_hub_s_form_of_hotpotqa_is_read(tmp_path):
    entries = json.loads(FILES["hotpotqa"].read_text())
    for entry in entries:
        titles, parts = zip(*entry["context"], strict=True)
        entry["context"] = {"title": titles, "sentences": parts}
    path = tmp_path / "hub.json"
    path.write_text(json.dumps(entries))
    apart = ruler("qa_2", 2048, Words(), 3, hotpotqa=path)
    assert apart == ruler("qa_2", 2048, Words(), 3, hotpotqa=FILES["hotpotqa"])


@pytest.mark.skipif(not (ESSAYS.parent / "ruler").is_dir(), reason="parts of SQuAD and HotpotQA are not here")
@pytest.mark.parametrize("task, option, name", [("qa_1", "squad", "squad"), ("qa_2", "hotpotqa", "hotpotqa")])
def test_the_real_questions(task, option, name):
    path = ESSAYS.parent / "ruler" / f"{name}_dev_part.json"
    samples = ruler(task, 4096, Words(), 50, **{option: path})
    assert all(sample.extra["length"] <= 4096 for sample in samples)
    spoken = [s for s in samples if s.references[0].lower() not in ("yes", "no")]
    assert all(reference in s.context for s in spoken for reference in s.references)


@pytest.mark.parametrize("task, answers", [("vt", 5), ("cwe", 10), ("fwe", 3), ("niah_single_1", 1), ("qa_2", 1)])
def test_near_its_smallest_length_a_task_is_whole_or_refused(task, answers, essay):
    made = 0
    for length in range(240, 1000, 12):
        try:
            samples = make(task, length, essay, samples=3)
        except BadParameter:
            assert not made  # what fits, fits in more
            continue
        made += 1
        assert {len(set(sample.references)) for sample in samples} == {answers}
        assert all(reference in sample.context for sample in samples for reference in sample.references)
    assert made


def test_essays_come_from_a_text_a_folder_or_the_official_file(tmp_path):
    (tmp_path / "b.txt").write_text("Two\n\nand")
    (tmp_path / "a.txt").write_text("One. ")
    (tmp_path / "all.json").write_text(json.dumps({"text": "One. Two and"}))
    for path in (tmp_path, tmp_path / "all.json"):
        assert Essays(path).words == ["One.", "Two", "and"]
    assert Essays(tmp_path / "b.txt").words == ["Two", "and"]
    assert " ".join(Essays(tmp_path).sentences(5)) == "One. Two and One. Two"


@pytest.mark.parametrize(
    "name, content", [("no.txt", None), ("e.txt", " \n"), ("b.txt", b"\xff\xfe"), ("e.json", "{}")]
)
def test_essays_that_cannot_be_read(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=rf"haystack=.*{name}"):
        Essays(tmp_path / name)


def test_an_empty_folder_has_no_essays(tmp_path):
    with pytest.raises(BadInput, match="no .*txt"):
        Essays(tmp_path)


def test_our_own_splitter_cuts_between_sentences_and_loses_nothing():
    text = (
        'Dr. Who left at 5 p.m. today. "Why?" She asked J. Smith! (He knew.) It was 3.5 km. 42 men ran e.g. A. B. Cook.'
    )
    assert sentences(text) == [
        "Dr. Who left at 5 p.m. today.",
        '"Why?"',
        "She asked J. Smith!",
        "(He knew.)",
        "It was 3.5 km.",
        "42 men ran e.g. A. B. Cook.",
    ]
    assert sentences("") == [""]


def test_samples_say_which_splitter_cut_them(essay):
    assert make("niah_single_2", 1024, essay)[0].extra["splitter"] == splitter()[0]


def test_missing_files_are_named():
    for task, option in (("niah_single_2", "haystack"), ("qa_1", "squad"), ("qa_2", "hotpotqa")):
        with pytest.raises(BadInput, match=f"{task} reads a file that was not given: {option}="):
            ruler(task, 4096, Words(), 1)


def test_what_can_be_made_is_known_before(monkeypatch):
    monkeypatch.setattr(vocabulary, "installed", lambda: True)
    assert unavailable(haystack="essays", squad="squad", hotpotqa="hotpotqa") == {}
    skipped = unavailable()
    runnable = [task for task in TASKS if task not in skipped]
    assert runnable == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert "squad=" in skipped["qa_1"] and set(runnable) | set(skipped) == set(TASKS)
    monkeypatch.setattr(vocabulary, "installed", lambda: False)
    skipped = unavailable()
    runnable = [task for task in TASKS if task not in skipped]
    assert runnable == ["niah_multikey_3", "vt", "fwe"] and "pip install wonderwords" in skipped["cwe"]


def test_without_wonderwords_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    vocabulary.words.cache_clear()
    vocabulary.pairs.cache_clear()
    for task in ("niah_single_1", "cwe"):
        with pytest.raises(MissingExtra, match="pip install wonderwords==2.2.0"):
            ruler(task, 2048, Words(), 1)
    assert ruler("niah_multikey_3", 2048, Words(), 1)


def test_samples_are_skipped_only_where_there_are_no_words(monkeypatch):
    monkeypatch.setattr(vocabulary, "version", lambda: "wonderwords 9.9")
    monkeypatch.setattr(vocabulary, "installed", lambda: True)
    need_words("cwe")
    monkeypatch.setattr(vocabulary, "installed", lambda: False)
    need_words("vt")
    with pytest.raises(pytest.skip.Exception, match="not installed"):
        need_words("cwe")


def test_an_unknown_task_answers_with_the_right_one():
    with pytest.raises(UnknownName, match="Did you mean 'niah_single_1'"):
        ruler("niah_single1", 4096, Words(), 1)


def test_the_number_of_samples_must_be_possible():
    with pytest.raises(BadParameter, match="samples=0"):
        ruler("fwe", 4096, Words(), 0)
    with pytest.raises(BadParameter, match=r"samples=10000, but .*mini_squad.json has \d+ questions"):
        ruler("qa_1", 4096, Words(), 10000, squad=FILES["squad"])


ARTICLE = {"paragraphs": [{"context": "Text.", "qas": []}]}
QUESTION = {"question": "Who?", "answers": [{"text": "She"}], "is_impossible": False}


def article(**changes) -> dict:
    return {"data": [ARTICLE, {"paragraphs": [{"context": "Text.", "qas": [{**QUESTION, **changes}]}]}]}


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "squad.json' is not JSON"),
        ([], "squad.json has no 'data' that is a list; it is a list"),
        ({"version": 2}, "squad.json has no 'data' that is a list; it has version"),
        ({"data": [ARTICLE, 5]}, "squad.json, article 1 has no 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "squad.json, article 0, paragraph 0 has no 'context'"),
        ({"data": [{"paragraphs": [{"context": ""}]}]}, "squad.json, article 0, paragraph 0 has no 'qas'"),
        (article(question=None), "squad.json, article 1, paragraph 0, question 0 has no 'question'"),
        (article(answers="She"), "squad.json, article 1, paragraph 0, question 0 has no 'answers'"),
        (article(answers=[{}]), "squad.json, article 1, paragraph 0, question 0 has no 'text'"),
        (article(answers=[]), "squad.json, article 1, paragraph 0, question 0 has no answers"),
        (article(is_impossible=True), "squad.json' has no questions"),
    ],
)
def test_a_damaged_squad_file_is_named_with_its_entry(tmp_path, content, said):
    path = tmp_path / "squad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(BadInput, match=re.escape(said)):
        ruler("qa_1", 4096, Words(), 1, squad=path)


HOT = {"question": "Who?", "answer": "She", "context": [["Title", ["She did."]]]}


@pytest.mark.parametrize(
    "content, said",
    [
        ({"data": []}, "hot.json is not a list of questions"),
        ([], "hot.json' has no questions"),
        ([HOT, "x"], "hot.json, entry 1 has no 'question'"),
        ([HOT, {**HOT, "answer": 5}], "hot.json, entry 1 has no 'answer' that is a str"),
        ([{**HOT, "context": None}], "hot.json, entry 0: 'context' is not"),
        ([{**HOT, "context": []}], "hot.json, entry 0: 'context' is not"),
        ([{**HOT, "context": [["Title"]]}], "hot.json, entry 0: 'context' is not"),
        ([{**HOT, "context": {"title": ["a", "b"], "sentences": [["x"]]}}], "hot.json, entry 0: 'context' is not"),
        ([{**HOT, "context": {"titles": []}}], "hot.json, entry 0: 'context' is not"),
    ],
)
def test_a_damaged_hotpotqa_file_is_named_with_its_entry(tmp_path, content, said):
    path = tmp_path / "hot.json"
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=re.escape(said)):
        ruler("qa_2", 4096, Words(), 1, hotpotqa=path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInput, match="nowhere.json' cannot be read"):
        ruler("qa_1", 4096, Words(), 1, squad=tmp_path / "nowhere.json")


def test_pairs_are_the_sorted_products():
    firsts = ["well", "well-off", "a", "a-b", "a-b-c", "b", "Zed", "wellness", "a", "a!"]
    seconds = ["off", "off-x", "b", "b-c", "ship", "c", "-", "b", "!", "~"]
    expected = sorted({f"{first}-{second}" for first in firsts for second in seconds})
    pairs = Pairs(firsts, seconds)
    assert list(pairs) == expected and len(pairs) == len(expected)
    with pytest.raises(IndexError):
        pairs[len(pairs)]


def test_zeta():
    assert math.isclose(ZETA, sum(rank**-2.0 for rank in range(1, 10**6)), abs_tol=2e-6)


def test_the_words_of_ruler_are_pinned():
    extras = (HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"wonderwords=={vocabulary.OFFICIAL}"' in extras
