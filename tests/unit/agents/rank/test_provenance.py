"""What a rank reports about the provenance of a run, such as the command line that started it."""

from pathlib import Path

import pytest

from agents.rank import provenance
from agents.rank.provenance import LONGEST, command_line


def test_facts_fit_and_are_printable(tmp_path: Path) -> None:
    command = ["/x/engine/__main__.py", "run", "a b.toml", "run.name=\x1b[31m", "y" * 300]
    facts = provenance.provenance(tmp_path, tmp_path / ("c" * 300), command)
    assert facts["folder"] == str(tmp_path)
    assert "folder" not in provenance.provenance(tmp_path / "r\udcff"), "cannot be sent as text"
    assert "checkpoints" not in facts  # a shortened path would name another file
    line = facts["command"]
    assert isinstance(line, str) and line.startswith("engine run 'a b.toml' 'run.name= [31m'")
    assert line.isprintable() and len(line) == LONGEST and line.endswith("…")
    assert command_line(["/usr/bin/engine", "run"]) == "engine run"


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert provenance.provenance()["user"] == "unknown"
