"""kvkeep reproduce: only a grid without data may be left out."""

import pytest
from typer.testing import CliRunner

from kvkeep.cli import reproduce as command
from kvkeep.cli.app import app
from kvkeep.errors import BadInput, NoData
from kvkeep.evaluate.recipes.recipe import jobs, recipe
from kvkeep.evaluate.suite import RULER_SAMPLES


def second_fails(monkeypatch, error):
    """Every grid but the second has its rows."""
    asked = []

    def run(wanted, say):
        asked.append(wanted)
        if len(asked) == 2:
            raise error
        return [], {}

    monkeypatch.setattr(command.evaluation, "run", run)
    return asked


def test_a_grid_without_data_is_left_out_and_the_others_run(monkeypatch, tmp_path):
    asked = second_fails(monkeypatch, NoData("none of these tasks can be had: fwe is not here."))
    done = CliRunner().invoke(app, ["reproduce", "ahakv/table1", "--out", str(tmp_path)])
    assert done.exit_code == 0 and "left out: none of these tasks" in done.output
    assert len(asked) == len(jobs(recipe("ahakv/table1"))) > 2


def test_whatever_else_is_wrong_ends_the_run(monkeypatch, tmp_path):
    second_fails(monkeypatch, BadInput("'rows.jsonl' cannot be written (No space left on device)"))
    done = CliRunner().invoke(app, ["reproduce", "ahakv/table1", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "No space left" in done.output
    assert not (tmp_path / "comparison.csv").exists()


@pytest.mark.parametrize("name", ["eval", "reproduce"])
def test_the_help_says_how_many_samples_of_ruler_there_are(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert f"{RULER_SAMPLES} of RULER (officially 500)" in shown
