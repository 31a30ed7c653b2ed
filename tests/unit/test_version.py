"""Tests of the `--version` option of the commands `cockpit` and `engine`."""

import tomllib
from pathlib import Path

import pytest

from cockpit.cli.main import run as cockpit
from engine.cli.main import main as engine

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(("name", "main"), [("cockpit", cockpit), ("engine", engine)])
def test_version(name: str, main: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])  # type: ignore[operator]
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{name} {PROJECT['version']}\n"
