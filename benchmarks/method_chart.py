"""Draws docs/which_method.svg: the tables of RULER at 4,096 tokens in docs/RESULTS.md. Nothing is measured here."""

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PANELS = {  # the beginning of a paragraph in RESULTS.md, and the title of its table
    "**Question unknown**, Qwen2.5-Coder-0.5B": "Question unknown when the text is compressed",
    "**Question known**, Qwen2.5-Coder-0.5B": "Question known",
}
SHARES = ("3/4", "1/2", "1/4", "1/8", "1/10")
LEFT, TOP, WIDTH, HEIGHT, LABELS = 48, 84, 300, 360, 190  # pixels
COLOURS = {
    "kvkeep_context": "#0072b2", "kvkeep_lookahead": "#0072b2", "kvkeep": "#56b4e9", "kvzip": "#d55e00",
    "kvzip_plus": "#009e73", "lookahead": "#009e73", "compactor+adakv": "#8a6d00", "intentkv": "#8a6d00",
    "echo+shared": "#6a3d9a", "protokv": "#6a3d9a", "expected_attention+adakv": "#a6761d", "keydiff": "#555",
    "cake": "#555", "snapkv+adakv": "#cc79a7", "random": "#999",
}  # fmt: skip
STYLE = """text{font:13px sans-serif;fill:#222} .title{font-weight:bold} .grid{stroke:#ddd}
.full{stroke:#222;stroke-dasharray:4 3} polyline{fill:none;stroke-width:1.8} .ours{stroke-width:3.6}"""

Row = tuple[str, list[float], bool]  # a method, its scores by share of tokens kept, and whether it is ours


def table(results: str, begins: str) -> tuple[float, list[Row]]:
    """The score of `full`, and all other methods."""
    after = results[results.index(begins) :]
    lines = after[after.index("| method") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [(cell[0].strip("*"), [float(each) for each in cell[1:6]], "**" in cell[0]) for cell in cells]
    (full,) = [scores[0] for name, scores, _ in rows if name == "full"]
    return full, [row for row in rows if row[0] != "full"]


def panel(title: str, full: float, rows: list[Row], left: int) -> list[str]:
    """A line for every method: percent of what `full` scores, by share of tokens kept."""
    xs = [left + WIDTH * number / (len(SHARES) - 1) for number in range(len(SHARES))]
    drawn = [f'<text class="title" x="{left}" y="{TOP - 32}">{title}</text>']
    for percent in range(0, 101, 20):
        y = _y(percent)
        kind = "full" if percent == 100 else "grid"
        drawn.append(f'<line class="{kind}" x1="{left}" y1="{y:.0f}" x2="{left + WIDTH}" y2="{y:.0f}"/>')
        drawn.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{percent}</text>')
    drawn += [
        f'<text x="{x:.0f}" y="{_y(0) + 20:.0f}" text-anchor="middle">{share}</text>'
        for x, share in zip(xs, SHARES, strict=True)
    ]
    last = -1e9
    for name, scores, ours in sorted(rows, key=lambda row: -row[1][-1]):
        colour, points = COLOURS[name], [(x, _y(100 * score / full)) for x, score in zip(xs, scores, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        kind = "ours" if ours else "others"
        drawn.append(f'<polyline class="{kind}" stroke="{colour}" points="{path}"/>')
        last = max(points[-1][1], last + 15)  # labels do not cover each other
        x = left + WIDTH
        drawn.append(f'<line stroke="{colour}" x1="{x}" y1="{points[-1][1]:.1f}" x2="{x + 8}" y2="{last:.1f}"/>')
        weight = ' class="title"' if ours else ""
        drawn.append(f'<text{weight} x="{x + 11}" y="{last + 4:.1f}" style="fill:{colour}">{name}</text>')
    return drawn


def _y(percent: float) -> float:
    return TOP + HEIGHT * (1 - percent / 104)


def chart(results: str) -> str:
    drawn = []
    for number, (begins, title) in enumerate(PANELS.items()):
        drawn += panel(title, *table(results, begins), LEFT + number * (LEFT + WIDTH + LABELS))
    width, height = 2 * (LEFT + WIDTH + LABELS), TOP + HEIGHT + 58
    legend = [
        '<text x="10" y="22">RULER, 13 tasks at 4,096 tokens, n = 325, Qwen2.5-Coder-0.5B: percent of what the full '
        "cache scores, by share of tokens kept</text>",
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", page, *legend, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "which_method.svg").write_text(chart((DOCS / "RESULTS.md").read_text()))
