"""If `agents` is a package of another project, the commands refuse it with a one-sentence error message before they
import it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.preflight.package import package_refusal

ROOT = Path(__file__).parents[4]
OTHER = "raise SystemExit('imported')\n"  # content of its __init__.py


def test_this_projects_package_is_accepted() -> None:
    assert package_refusal() is None


@pytest.mark.parametrize(
    ("command", "status"),
    [(["-m", "engine", "run"], 2), (["-m", "cockpit", "log"], 2), (["-c", "from engine import load"], 1)],
)
def test_another_package_of_the_same_name_is_refused(command: list[str], status: int, tmp_path: Path) -> None:
    other = tmp_path / "agents" / "__init__.py"
    other.parent.mkdir()
    other.write_text(OTHER)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    sentence = done.stderr.splitlines()[-1]
    assert f"but finds {other};" in sentence and "in an environment of its own" in sentence
    assert done.returncode == status and (status == 1 or done.stderr.count("\n") == 1)
