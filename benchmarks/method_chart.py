"""Draws docs/which_method.svg: the tables of RULER at 4,096 tokens in docs/RESULTS.md. Nothing is measured here."""

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PANELS = {  # the beginning of a paragraph in RESULTS.md, and the title of its table
    "**Question known**, Qwen2.5-Coder-0.5B": "Question known (n = 325; kvkeep_lookahead: 92)",
    "**Question unknown**, the same model": "Question unknown (n = 194)",
}
LEFT, WIDTH, ROW, TOP, GAP = 250, 420, 20, 88, 70  # pixels
STYLE = """text{font:13px sans-serif;fill:#222} .title{font-weight:bold}
.grid{stroke:#ddd} .line{stroke:#999;stroke-width:2}
.quarter{fill:#0072b2}.eighth{fill:#fff;stroke:#d55e00;stroke-width:2.5}"""


def table(results: str, begins: str) -> tuple[float, list[tuple[str, float, float]]]:
    """The score of `full`, and every other method with its scores at a quarter and an eighth of the tokens."""
    after = results[results.index(begins) :]
    lines = after[after.index("| method") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [(name.strip("* ¹"), float(quarter), float(eighth)) for name, quarter, _, eighth, *_ in cells]
    (full,) = [quarter for name, quarter, _ in rows if name == "full"]
    return full, [row for row in rows if row[0] != "full"]


def panel(title: str, full: float, rows: list[tuple[str, float, float]], top: int) -> list[str]:
    """A row for every method: its share of what `full` scores, at a quarter and at an eighth."""
    bottom = top + ROW * len(rows)
    drawn = [f'<text class="title" x="10" y="{top - 10}">{title}</text>']
    for percent in range(0, 101, 20):
        x = LEFT + WIDTH * percent / 100
        drawn.append(f'<line class="grid" x1="{x:.0f}" y1="{top}" x2="{x:.0f}" y2="{bottom}"/>')
        drawn.append(f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle">{percent}</text>')
    for number, (name, *scores) in enumerate(rows):
        y = top + ROW * number + ROW // 2
        quarter, eighth = (LEFT + WIDTH * score / full for score in scores)
        drawn.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{name}</text>')
        drawn.append(f'<line class="line" x1="{eighth:.1f}" y1="{y}" x2="{quarter:.1f}" y2="{y}"/>')
        drawn.append(f'<circle class="eighth" cx="{eighth:.1f}" cy="{y}" r="5"/>')
        drawn.append(f'<circle class="quarter" cx="{quarter:.1f}" cy="{y}" r="5.5"/>')
    return drawn


def chart(results: str) -> str:
    drawn, top = [], TOP
    for begins, title in PANELS.items():
        full, rows = table(results, begins)
        drawn += panel(title, full, rows, top)
        top += ROW * len(rows) + GAP
    legend = [
        '<text x="10" y="22">RULER, 13 tasks at 4,096 tokens, Qwen2.5-Coder-0.5B: percent of what full scores</text>',
        f'<circle class="quarter" cx="{LEFT + 40}" cy="44" r="5.5"/><text x="{LEFT + 52}" y="48">a quarter kept</text>',
        f'<circle class="eighth" cx="{LEFT + 190}" cy="44" r="5"/><text x="{LEFT + 202}" y="48">an eighth kept</text>',
    ]
    height, width = top - GAP + 30, LEFT + WIDTH + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", page, *legend, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "which_method.svg").write_text(chart((DOCS / "RESULTS.md").read_text()))
