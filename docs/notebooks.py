"""For mkdocs.yml: examples/ as pages; notebooks with what they said when they last ran (docs/execute.py)."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

EXAMPLES = Path(__file__).parents[1] / "examples"


def on_files(files: Files, config: Any) -> Files:
    for path in EXAMPLES.iterdir():
        for name, content in pages(path).items():
            files.append(File.generated(config, f"examples/{name}", content=content, inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages of the site."""
    if page.file.src_uri.startswith("examples/"):
        return re.sub(r"\(([\w-]+)\.ipynb\)", r"(\1.md)", markdown.replace("](../docs/", "](../"))
    return re.sub(r"\(\.\./((?:\.\./)*examples/[\w-]+\.)(\w+)\)", _page, markdown)


def _page(link: re.Match[str]) -> str:
    return f"({link[1]}{'md' if link[2] == 'ipynb' else link[2]})"


def pages(path: Path) -> dict[str, str | bytes]:
    """The files of the site that one example becomes: itself, or a page and its pictures."""
    if path.suffix != ".ipynb":
        return {path.name: path.read_text()} if path.is_file() else {}
    made: dict[str, str | bytes] = {}
    parts = [part for cell in json.loads(path.read_text())["cells"] for part in cell_parts(cell, path.stem, made)]
    return {f"{path.stem}.md": "\n\n".join(parts), **made}


def cell_parts(cell: dict[str, Any], stem: str, pictures: dict[str, str | bytes]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *(output_part(each, stem, pictures) for each in cell["outputs"])]


def output_part(output: dict[str, Any], stem: str, pictures: dict[str, str | bytes]) -> str:
    """A picture, else HTML, else text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        name = f"{stem}-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode("".join(data["image/png"]))
        return f"![the figure this code makes]({name})"
    if "text/html" in data:
        return "".join(data["text/html"])
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"
