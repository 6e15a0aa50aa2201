"""The search script reads the rows it wrote."""

import importlib.util
import json
import sys
from pathlib import Path

from kvkeep.evaluate.results import Results

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_rows_of_a_search_may_hold_any_line_end(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("search_script", BENCHMARKS / "search.py")
    search = importlib.util.module_from_spec(spec)
    monkeypatch.delitem(sys.modules, "pool", raising=False)
    spec.loader.exec_module(search)
    row = {"task": "t", "id": "1", "protocol": "aware", "method": "full", "budget": None, "answer": "a\u2028b\u0085c"}
    Results(tmp_path / "rows.jsonl").add(row)
    assert search.read(tmp_path) == [row] == [json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8"))]
