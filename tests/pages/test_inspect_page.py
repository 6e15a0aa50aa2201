"""The page of `kvkeep inspect` in a browser: from disk, without a network, and with hostile texts."""

import time
from dataclasses import replace

import browser
import pytest
import tiny_chat
import torch
from packed import unpack

from kvkeep.pages.html import pack_bits, pack_levels, write_page
from kvkeep.pages.inspection import BINS, agreement, histogram
from kvkeep.pages.inspector import Inspector

DOCUMENT = "The keeper counted 4827163 geese. 🦢 مرحبا بالعالم <script>document.title = 'x'</script> <b>&amp;\n\n" * 5
QUESTION = "How many <i>geese</i>? مرحبا"
METHODS = [("kvkeep", 80), ("snapkv+adakv", 80), ("intentkv", 80), ("protokv", 80), ("actqkv", 128)]


@pytest.fixture(scope="module")
def driver():
    driver = browser.open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def facts():
    with torch.no_grad():
        found = Inspector(*tiny_chat.sharp(), DOCUMENT, QUESTION, "aware", 6).inspect(METHODS, "<script>tiny")
    first, last = found.parts["document"]
    methods = [
        replace(each, answer=f"<img src=x onerror=alert({i})>", answer_kept=i / 8, differs=i == 1)
        for i, each in enumerate(found.methods)
    ]
    return replace(found, answer_tokens=[first + 20, last - 5], methods=methods)


@pytest.fixture(scope="module")
def path(facts, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "inspect.html"
    assert write_page(path, "inspect", facts) < 10_000_000
    return path


@pytest.fixture
def page(driver, path):
    page = browser.Page(driver, path)
    yield page
    assert page.errors == [] and page.requests == []


def shown(page):
    """What the page says of every token."""
    page("document.querySelectorAll('.block').forEach((each, i) => shadeBlock(blocks[i]))")
    return page("tokens.map((_, i) => words(i))")


def test_the_text_is_shown_as_it_is(page, facts):
    assert page("$('text').textContent") == "".join(facts.tokens) and page("document.title") == "kvkeep: what was kept"
    assert page("$('question').textContent") == QUESTION and "<script>tiny" in page("$('setting').textContent")
    assert page("document.querySelectorAll('#text script, #text b, #answers img, h1 i').length") == 0
    assert page.texts("#answers td.answer")[1] == "<img src=x onerror=alert(1)> differs from full"


def test_numbers_are_those_of_the_facts(page, facts):
    rows = page(
        "[...document.querySelectorAll('#answers tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    for row, method in zip(rows, facts.methods, strict=True):
        assert row[:2] == [method.name, "–" if method.name == "full" else str(method.budget)]
        assert row[2].endswith("differs from full") == method.differs
        assert abs(float(row[5].removesuffix(" s")) - method.cost.first_token_s) <= 0.00501
        kept = method.cost.kept_per_head
        assert row[3] == (f"{kept:,.0f}" if kept % 1 == 0 else f"{kept:,.1f}")
        found = sum(map(sum, method.found)) / len(facts.layers) / facts.kv_heads
        assert abs(float(row[7].removesuffix(" %")) - 100 * found) <= 0.5
        assert abs(float(row[9].removesuffix(" of 4 heads")) - method.answer_kept * 4) <= 0.5
    cells = [float(text) for text in page.texts("#agreement td")]
    assert cells == [pytest.approx(share, abs=0.0051) for line in facts.agreement for share in line]


@pytest.mark.parametrize("method", range(5))
def test_every_method_layer_and_head_is_shown(page, facts, method):
    """Counts of kept heads, against the bits of the facts."""
    page(f"choose({method})")
    mask, verb = unpack(facts.methods[1 + method].kept), "retrieved" if facts.methods[1 + method].retrieves else "kept"
    for layer in (-1, 0, 1):
        for head in (-1, 0, 1):
            page.set("layer", layer)
            page.set("head", head)
            chosen = mask[slice(None) if layer < 0 else [layer]][:, slice(None) if head < 0 else [head]]
            counts, heads = chosen.sum((0, 1)).tolist(), chosen.shape[0] * chosen.shape[1]
            expected = [f"{verb} by {n} of {heads} heads" for n in counts]
            if heads == 1:
                expected = [f"{verb} by {'this head' if n else 'no: not by this head'}" for n in counts]
            assert shown(page) == expected
            levels = page("Array.from(level)")
            assert levels == [pytest.approx((n / heads) ** 0.5, abs=1e-6) for n in counts]
            steps = page("blocks.flatMap((block) => block.spans.map((span) => Number(span.dataset.s)))")
            assert [step > 0 for step in steps] == [n > 0 for n in counts]
    assert page("$('layer-said').textContent + $('head-said').textContent") == "11"


def test_what_else_shades_the_text(page, facts):
    page("choose(2)")  # intentkv
    assert page.texts("#by option") == ["kept", "score", "divergence", "intention", "the answer's attention"]
    values = facts.methods[3].values[1]
    before = page("$('profile').toDataURL()")
    page.set("by", "divergence")
    assert page("$('profile').toDataURL()") != before and "IntentKV" in page("$('profile-about').textContent")
    mean = unpack(values.values).mean((0, 1))
    said = shown(page)
    assert said[0] == "divergence: not in its window"
    for at in (0, len(mean) // 2, len(mean) - 1):
        number = float(said[values.first + at].split()[1])
        assert number == pytest.approx(
            float(mean[at]), abs=0.01 * (values.values.high - values.values.low) + 5e-3 * number
        )
    page("choose(3)")  # protokv: no divergence there
    assert page("state.by") == "kept"
    page.set("by", "cluster")
    assert shown(page)[10].startswith("cluster ")


def test_pictures_change_with_the_method(page):
    pictures = ("map", "histogram", "heat", "profile")
    first = [page(f"$('{name}').toDataURL()") for name in pictures]
    page("choose(1)")
    assert all(page(f"$('{name}').toDataURL()") != old for name, old in zip(pictures, first, strict=True))
    old = page("$('heat').toDataURL()")
    page.set("heat-by", "found")
    assert page("$('heat').toDataURL()") != old and page("$('windows-panel').hidden")
    page("choose(4)")
    assert not page("$('windows-panel').hidden") and "256 tokens at a time" in page("$('windows-about').textContent")


def test_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    radios = page.driver.find_elements("css selector", "#methods input")
    radios[0].send_keys(Keys.ARROW_RIGHT)
    assert page("method().name") == METHODS[1][0]
    layer = page.driver.find_element("id", "layer")
    layer.send_keys(Keys.ARROW_RIGHT)
    assert page("$('layer-said').textContent") == "0"
    layer.send_keys(Keys.TAB)
    assert page("document.activeElement.id") == "head"
    page("$('text').dispatchEvent(new Event('focus'))")
    page("sayToken({target: blocks[0].spans[0]})")
    assert page("$('said').textContent").startswith("token 0 of ")


def test_light_and_dark(driver, path):
    colours = []
    for dark in (False, True):
        page = browser.Page(driver, path, dark)
        colours.append(page("getComputedStyle(document.body).backgroundColor"))
        assert page("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        page("$('theme').click()")
        assert page("document.documentElement.dataset.theme") == ("light" if dark else "dark")
        assert page.errors == []
    assert colours == ["rgb(255, 255, 255)", "rgb(18, 22, 28)"]


@pytest.mark.parametrize("width", [380, 760, 1300])
def test_nothing_is_wider_than_the_screen(page, width):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page("show(true)")
        assert page("document.documentElement.scrollWidth") <= width
        panels = "[...document.querySelectorAll('aside > section:not([hidden])')]"
        boxes = page(f"{panels}.map((each) => each.getBoundingClientRect().toJSON())")
        assert all(below["top"] >= above["bottom"] for above, below in zip(boxes, boxes[1:], strict=False))
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_words_can_be_read_on_every_shade(page):
    """Contrast of WCAG AA, in both themes."""
    for theme in ("light", "dark"):
        page(f"setTheme('{theme}', () => show(true))")
        for share in range(11):
            back, ink = (_luminance(page(f"{name}({share / 10})")) for name in ("shade", "inkOn"))
            assert (max(back, ink) + 0.05) / (min(back, ink) + 0.05) >= 4.5


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_long_document_stays_responsive(driver, tmp_path, facts):
    """100,000 tokens, 90 heads: opened, switched and scrolled."""
    n, layers, heads = 100_000, 30, 3
    torch.manual_seed(0)
    methods = []
    for method in facts.methods[1:4]:
        mask = torch.zeros(layers, heads, n, dtype=torch.bool)
        mask.scatter_(-1, torch.rand(layers, heads, 512).mul(n).long(), True)
        values = replace(facts.methods[1].values[0], values=pack_levels(torch.rand(1, 1, n)))
        about = {"kept": pack_bits(mask), "counts": mask.sum(-1).tolist(), "histogram": histogram(mask, BINS)}
        table = [[0.5] * heads] * layers
        methods.append(replace(method, **about, values=(values,), found=table, mass=table))
    texts = [["geese ", "مرحبا ", "🦢", "a ", ".\n"][i % 5] for i in range(n)]
    parts = {"document": (3, n - 20), "question": (n - 20, n - 3)}
    compared, masks = [method.name for method in methods], [unpack(method.kept) for method in methods]
    facts = replace(facts, tokens=texts, parts=parts, layers=list(range(layers)), kv_heads=heads, attention=None)
    facts = replace(facts, answer_tokens=[70_000], attended=[5, 80_000], methods=[facts.methods[0], *methods])
    shown = replace(facts, agreement=agreement(masks), compared=compared)
    assert write_page(tmp_path / "long.html", "inspect", shown) < 10_000_000
    began = time.perf_counter()
    page = browser.Page(driver, tmp_path / "long.html")
    assert time.perf_counter() - began < 15
    page.wait("blocks.find((one) => one.end > 70000).near")
    assert page("document.querySelectorAll('.block span').length") < 20_000
    for action in ("choose(1)", "choose(2)", "goTo(50)", "$('text').scrollTop = 1e9"):
        took = page(f"(() => {{ const t = performance.now(); {action}; return performance.now() - t; }})()")
        assert took < 2000, (action, took)
    page.wait("($('text').scrollTop = 1e9, blocks[blocks.length - 1].spans)")  # goTo scrolls for two frames more
    assert page.errors == []
