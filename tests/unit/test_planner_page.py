"""Tests that docs/plan/planner.md shows what its commands print.

`python -m tests.unit.test_planner_page` rewrites the page.
"""

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan" / "planner.md"
BLOCK = re.compile(r"```console\n\$ (engine [^\n]+)\n(.*?)```", re.DOTALL)


def printed(command: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    return out.getvalue()


def examples() -> list[Any]:
    """Each command in docs/plan/planner.md, with the output that the page shows for it. `make test` omits the commands
    with `--search`, except those for DeepSeek-V3."""
    return [
        pytest.param(
            command,
            shown,
            id=command,
            marks=[pytest.mark.exhaustive] if "--search" in command and "deepseek-v3" not in command else [],
        )
        for command, shown in BLOCK.findall(PAGE.read_text())
    ]


@pytest.mark.parametrize(("command", "shown"), examples())
def test_the_page_shows_what_the_command_prints(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert printed(command) == shown


def test_the_page_has_the_examples() -> None:
    commands = [command for command, _ in BLOCK.findall(PAGE.read_text())]
    assert len(commands) >= 6 and sum("--search" in command for command in commands) >= 4


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{printed(m[1])}```", PAGE.read_text()))
