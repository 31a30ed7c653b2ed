"""What `engine run` prints."""

import json

import pytest

from engine.layout import load
from engine.output import Output
from tests.unit.engine.test_layout import DEMO


def test_a_run_says_what_grid_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    layout = load(DEMO)
    Output(layout, as_json=False).start("demo-1")
    assert "demo-1: 8 ranks, pp=2 x dp_shard=2 x tp=2 x ep=4, 1f1b" in capsys.readouterr().out
    Output(layout, as_json=True).start("demo-1")
    event = json.loads(capsys.readouterr().out)
    assert (event["world"], event["grid"]["pp"], event["grid"]["cp"]) == (8, 2, 1)
