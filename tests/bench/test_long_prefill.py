"""The script that measures very long prompts runs, on a tiny model."""

import json
import runpy
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_long_text_is_read_and_measured(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["long_prefill.py", "--length", "1500", "--budget=512", "--max-new-tokens=4"])
    runpy.run_path(str(BENCHMARKS / "long_prefill.py"), run_name="__main__")
    *progress, last = capsys.readouterr().out.splitlines()
    assert "1,500 tokens" in progress[-1] and json.loads(last)["prefill_s"] > 0
