"""bash completes commands, options, layouts and knobs with the scripts that `engine completion` and
`cockpit completion` print."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cockpit.cli.main import run as cockpit
from engine.cli.main import main as engine

pytest.importorskip("shtab")
BASH = shutil.which("bash")
COMPLETE = """
source "$1"
COMP_LINE="$2"; COMP_WORDS=($2); [[ "$2" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); compopt() { printf 'compopt %s\\n' "$*"; }
_$3_completion "$3" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
CASES = [
    ("engine pl", {"plan"}),
    ("engine plan deepseek-v3", {"deepseek-v3", "deepseek-v3-mini"}),
    ("engine plan demo grid.dp_s", {"grid.dp_shard=", "compopt -o nospace"}),
    ("engine plan --roof", {"--roofline"}),
    ("engine simulate demo --scenario strag", {"straggler"}),
    ("cockpit s", {"schema", "serve", "set", "snapshot", "stacks", "status"}),
    ("cockpit set micro", {"micro_batches=", "compopt -o nospace"}),
    ("cockpit relayout grid.tp", {"grid.tp=", "compopt -o nospace"}),
    ("cockpit export --format pa", {"parquet"}),
    ("cockpit demo --simulate kimi", {"kimi-k2"}),
    ("cockpit attach my-", {"my-run"}),
]


def script(command: str, shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    calls: dict[str, Callable[[list[str]], object]] = {"engine": engine, "cockpit": cockpit}
    calls[command](["completion", shell])
    return capsys.readouterr().out


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    for command in ("engine", "cockpit"):
        (tmp_path / command).write_text(script(command, "bash", capsys))
    for line, wanted in CASES:
        command = line.split()[0]
        found = subprocess.run(
            [str(BASH), "-c", COMPLETE, "bash", command, line, command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert {*found.stdout.split("\n")} - {"", "compopt -o filenames"} == wanted, (line, found.stderr)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_accepts_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    for command in ("engine", "cockpit"):
        text = script(command, shell, capsys)
        read = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
        assert read.returncode == 0 and not read.stderr and "deepseek-v3" in text
