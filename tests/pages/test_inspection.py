"""Facts of `kvkeep inspect`, against plain loops over what the caches say."""

import json
from dataclasses import asdict, replace

import pytest
import tiny_chat
import torch
from packed import unpack

import kvkeep
from kvkeep.errors import BadInput, BadParameter, UnknownName
from kvkeep.model.chat import context_ids, encode, join_question, question_ids
from kvkeep.pages.html import as_json, pack_bits, pack_levels, pack_numbers, page
from kvkeep.pages.inspection import (
    TOP,
    MethodFacts,
    agreement,
    answer_words,
    found_of,
    histogram,
    kept_mask,
    mass_of,
    most_attended,
)
from kvkeep.pages.inspector import Inspector, differs
from kvkeep.pages.method_values import answer_attention, evicting, method_values

DOCUMENT = "The keeper counted 4827163 geese. 🦢 مرحبا <script>alert(1)</script> <!-- \n\n" * 4
QUESTION = "How many geese?"
METHODS = [("kvkeep", 60), ("snapkv+adakv", 60), ("intentkv", 60), ("protokv", 60), ("ahakv", 60), ("actqkv", 64)]


@pytest.fixture(scope="module", params=["aware", "agnostic"])
def inspected(request):
    with torch.no_grad():
        inspector = Inspector(*tiny_chat.sharp(), DOCUMENT, QUESTION, request.param, 6)
        return inspector, inspector.inspect(METHODS, "tiny")


def cache_of(inspector, method, budget):
    """The cache when the same question is answered, by the public API alone."""
    engine = kvkeep.Engine(inspector.model, inspector.tokenizer, method, budget, history=None)
    if inspector.protocol == "aware":
        engine.generate(DOCUMENT, question=QUESTION, max_new_tokens=6)
        return engine.cache
    handle = engine.read(DOCUMENT).submit(QUESTION, max_new_tokens=6)
    handle.result()
    return handle.cache


@pytest.mark.filterwarnings("ignore::kvkeep.errors.QueryAwareWarning")
def test_what_every_head_kept(inspected):
    inspector, facts = inspected
    for (name, budget), shown in zip(METHODS, facts.methods[1:], strict=True):
        cache, n, mask = cache_of(inspector, name, budget), len(facts.tokens), unpack(shown.kept)
        assert shown.name == name and facts.layers == cache.compressed_layers
        for i, layer in enumerate(cache.compressed_layers):
            bins = [0] * len(shown.histogram[i])
            for head, positions in enumerate(cache.kept(layer)[0]):
                inside = [position for position in positions if position < n]
                assert mask[i, head].nonzero().flatten().tolist() == inside
                assert shown.counts[i][head] == len(inside)
                for position in inside:
                    bins[position * len(bins) // n] += 1
            assert shown.histogram[i] == bins
        mean = sum(map(sum, shown.counts)) / mask.shape[0] / mask.shape[1]
        assert shown.cost.kept_per_head == round(mean, 2) < n and shown.cost.bytes == cache.report().bytes


def test_full_is_the_first_and_keeps_all(inspected):
    _, facts = inspected
    full = facts.methods[0]
    assert full.name == "full" and full.kept is None and full.error == ""
    assert {count for layer in full.counts for count in layer} == {len(facts.tokens)}
    assert all(share == 1 for table in (full.found, full.mass) for layer in table for share in layer)


def test_text_and_parts(inspected):
    inspector, facts = inspected
    chat = tiny_chat.tokenizer().apply_chat_template(
        [{"role": "user", "content": join_question(DOCUMENT, QUESTION)}], tokenize=False, add_generation_prompt=True
    )
    assert "".join(facts.tokens) == chat
    begin, end = facts.parts["question"]
    assert "".join(facts.tokens[begin:end]).strip() == QUESTION
    begin, end = facts.parts["document"]
    assert "".join(facts.tokens[begin:end]).strip() == DOCUMENT.strip()


def test_agreement_by_sets(inspected):
    _, facts = inspected
    assert facts.compared == [name for name, _ in METHODS]
    masks = [unpack(shown.kept) for shown in facts.methods[1:]]
    for one, row in zip(masks, facts.agreement, strict=True):
        for other, shown in zip(masks, row, strict=True):
            shares = []
            for layer in range(len(facts.layers)):
                for head in range(facts.kv_heads):
                    a, b = ({i for i, kept in enumerate(mask[layer, head]) if kept} for mask in (one, other))
                    shares.append(len(a & b) / len(a | b))
            assert shown == pytest.approx(sum(shares) / len(shares), abs=1e-4)


def full_attention(inspector, ids, answer):
    """The answer's attention by transformers' own eager attention. [layers, kv_heads, n]"""
    model, _ = tiny_chat.sharp()
    model.set_attn_implementation("eager")
    layers = model(torch.tensor([ids + answer[:-1]]), output_attentions=True).attentions
    rows = torch.stack(layers)[:, 0, :, -len(answer) :, : len(ids)].mean(2)  # [layers, heads, n]
    return rows.view(len(layers), 2, -1, len(ids)).mean(2)


def ids_of(inspector):
    if inspector.protocol == "aware":
        return encode(inspector.tokenizer, join_question(DOCUMENT, QUESTION))[0].tolist()
    context = context_ids(inspector.tokenizer, DOCUMENT)
    return context + question_ids(inspector.tokenizer, DOCUMENT, QUESTION, context)


def test_what_the_answer_attended_to(inspected):
    """Against attention as transformers returns it, and overlaps by loops."""
    inspector, facts = inspected
    ids = ids_of(inspector)
    engine = kvkeep.Engine(inspector.model, inspector.tokenizer, "full")
    list(engine.stream(DOCUMENT, question=QUESTION, max_new_tokens=6))
    expected = full_attention(inspector, ids, engine.answer.ids)
    torch.testing.assert_close(answer_attention(inspector.model, ids, engine.answer.ids), expected)
    step = (facts.attention.values.high - facts.attention.values.low) / 255
    clipped = expected.clamp(max=facts.attention.values.high)
    torch.testing.assert_close(unpack(facts.attention.values), clipped, atol=step, rtol=0)
    for shown in facts.methods[1:]:
        mask = unpack(shown.kept)
        for layer in range(len(facts.layers)):
            for head in range(facts.kv_heads):
                row = expected[layer, head].tolist()
                best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:TOP]
                found = sum(bool(mask[layer, head, i]) for i in best) / TOP
                assert shown.found[layer][head] == pytest.approx(found, abs=1.01 / TOP)  # ties
                mass = sum(share for i, share in enumerate(row) if mask[layer, head, i]) / sum(row)
                assert shown.mass[layer][head] == pytest.approx(mass, abs=2e-4)


def test_values_are_those_of_the_run(inspected):
    """The watched run keeps what the method keeps, and what is shown of it is what the method computes."""
    inspector, facts = inspected
    names = {shown.name: [value.name for value in shown.values] for shown in facts.methods}
    assert names["intentkv"] == ["score", "divergence", "intention"]
    assert names["protokv"] == ["score", "outlier degree", "cluster"] and names["ahakv"] == ["score", "value prior"]
    assert names["kvkeep"] == ["score"] and names["full"] == names["actqkv"] == []
    for shown in facts.methods[1:]:
        for value in shown.values:
            compressed = len(facts.tokens) if inspector.protocol == "aware" else facts.parts["document"][1]
            assert value.first + value.values.shape[2] == compressed


def test_higher_scores_are_kept():
    model, tokenizer = tiny_chat.sharp()
    ids = encode(tokenizer, DOCUMENT)[0].tolist()
    values = method_values(model, tokenizer, ids, evicting([("tova", 60)]))["tova"][0].values
    cache = kvkeep.Cache(model, "tova", 60)
    model(torch.tensor([ids]), past_key_values=cache)
    mask, scores = kept_mask(cache, len(ids)), unpack(values)
    step = (values.high - values.low) / 255
    for layer in range(2):
        for head in range(2):
            kept, evicted = scores[layer, head][mask[layer, head]], scores[layer, head][~mask[layer, head]]
            assert kept.min() + step >= evicted.max()


def test_windows_of_a_retrieval_method(inspected):
    _, facts = inspected
    shown = {each.name: each for each in facts.methods}["actqkv"]
    assert shown.retrieves and not facts.methods[0].retrieves
    shares = unpack(shown.windows.retrieved)
    for row in range(shares.shape[1]):  # a window sees nothing after itself
        seen = min(len(facts.tokens), (row + 1) * shown.windows.size)
        after = [bin for bin in range(shares.shape[2]) if bin * len(facts.tokens) >= seen * shares.shape[2]]
        assert not shares[:, row, after].any() and shares[:, row, 0].all()


def test_histogram_agreement_and_overlap_of_a_known_mask():
    mask = torch.zeros(1, 2, 10, dtype=torch.bool)
    mask[0, 0, [0, 1, 9]] = mask[0, 1, [0, 5]] = True
    other = torch.zeros_like(mask)
    other[0, :, 0] = True
    assert histogram(mask, 5) == [[3, 0, 1, 0, 1]] and histogram(mask, 99) == [[2, 1, 0, 0, 0, 1, 0, 0, 0, 1]]
    assert agreement([mask, other])[0][1] == pytest.approx((1 / 3 + 1 / 2) / 2, abs=1e-4)
    attention = torch.arange(10.0).expand(1, 2, 10)
    assert found_of(mask, attention, 2) == [[0.5, 0.0]] and found_of(mask, attention, 99) == [[0.3, 0.2]]
    assert mass_of(mask, attention) == [[round(10 / 45, 4), round(5 / 45, 4)]]
    assert most_attended(attention / 100, (2, 8), 3) == [5, 6, 7]


def test_words_of_the_answer():
    texts = ["<s>", "The ", "motor ", "is ", "48", "27", "163", ". It ", "was ", "new", ".", "What is the motor?"]
    assert answer_words(texts, (1, 11), "What is the motor?", "The motor is 4827163.") == [4, 5, 6]
    assert answer_words(texts, (1, 11), "What is the motor?", "It is new") == []  # too short to tell anything
    assert answer_words(texts, (1, 11), "Which?", "a MOTOR") == [2]


@pytest.mark.parametrize(
    ("full", "other", "marked"),
    [("Room 4.", "Room\n 4.", False), ("Room 4.", "Room 5.", True), ("Room 4.", "", True), (None, "Room 5.", False)],
)
def test_an_answer_that_is_not_that_of_full_is_marked(full, other, marked):
    facts = [MethodFacts("full", None, "", answer=full or "", error="" if full else "too long")]
    facts += [MethodFacts("snapkv", 64, "", answer=other), MethodFacts("h2o", 64, "", error="too long")]
    assert [differs(each, facts[0]) for each in facts] == [False, marked, False]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100])
def test_packed_arrays(n):
    torch.manual_seed(n)
    mask, values = torch.rand(2, 3, n) < 0.3, torch.randn(2, 3, n)
    assert unpack(pack_bits(mask)).equal(mask)
    packed = pack_levels(values)
    torch.testing.assert_close(unpack(packed), values, atol=(packed.high - packed.low) / 500, rtol=0)
    assert unpack(pack_levels(values, high=0.1)).max() <= 0.1 + 1e-6
    numbers = torch.randint(0, 65536, (2, n))
    assert unpack(pack_numbers(numbers)).long().equal(numbers)


def test_the_page_holds_the_facts_and_no_markup_of_the_text(inspected):
    _, facts = inspected
    html = page("inspect", facts)
    start = html.index('id="facts">') + len('id="facts">')
    shown = json.loads(html[start : html.index("</script>", start)])
    assert shown == json.loads(json.dumps(asdict(facts)))
    assert "<script>alert" not in html and "{{" not in html and "<!-- " not in html[start:]
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in html and len(html.encode()) < 1_000_000


def test_texts_that_would_end_a_script():
    model, tokenizer = tiny_chat.sharp()
    facts = Inspector(model, tokenizer, "</script><script>x</script>" * 5, "<!--<script>?", max_new_tokens=2)
    text = as_json(facts.inspect([("snapkv", 40)], "</script>"))
    assert "<" not in text and json.loads(text)["model"] == "</script>"


def test_mistakes():
    model, tokenizer = tiny_chat.sharp()
    with pytest.raises(UnknownName, match="snapkv"):
        Inspector(model, tokenizer, "text", "question").inspect([("snapvk", 40)], "tiny")
    with pytest.raises(BadParameter, match="protocol 'both'"):
        Inspector(model, tokenizer, "text", "question", "both")
    with pytest.raises(BadInput, match="give a method beside full"):
        Inspector(model, tokenizer, "text", "question", max_new_tokens=1).inspect([], "tiny")
    with pytest.raises(BadInput, match="context length is 1024"):
        Inspector(model, tokenizer, "text " * 300, "question").inspect([("snapkv", 40)], "tiny")


def test_a_text_beyond_the_context_length():
    """`full` cannot read it; a method for any length does, and the page says what is missing."""
    model, tokenizer = tiny_chat.sharp()
    inspector = Inspector(model, tokenizer, "The keeper counted geese. " * 50, "How many?", max_new_tokens=3)
    facts = inspector.inspect([("actqkv", 128), ("snapkv", 128)], "tiny")
    full, actqkv, snapkv = facts.methods
    assert "context length" in full.error and "context length" in snapkv.error and actqkv.error == ""
    assert facts.compared == ["actqkv"] and facts.attention is None and "not known" in facts.note
    assert actqkv.found is None and len(facts.tokens) > 1024 and actqkv.windows.retrieved.shape[1] > 4
    assert json.loads(as_json(replace(facts, note="")))["methods"][2]["kept"] is None
