"""Installs a built wheel into a fresh environment outside the checkout, and runs its commands there (`make package`).

    python -m tests.package.check_wheel DIST

If a command fails or does not print the expected text, the check stops and prints the command's output.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = "engine,cockpit,plan,web"
HEADLESS = {"TEXTUAL_DRIVER": "textual.drivers.headless_driver:HeadlessDriver"}
DEADLINE_S = 120.0
# The words of each command, and a text that its output must contain.
COMMANDS = [
    (["cockpit", "--help"], "See and steer a training run"),
    (["train-cockpit", "--help"], "See and steer a training run"),
    (["engine", "layouts"], "layouts/frontier/deepseek-v3.toml"),
    (["engine", "plan", "deepseek-v3"], "2,048 ranks on H800"),
    (["engine", "plan", "layouts/demo.toml", "--hardware", "H100", "--roofline"], "demo"),
    (["engine", "simulate", "demo", "--scenario", "straggler", "--steps", "5", "--speed", "max"], "step"),
    (["engine", "run", "demo", "train.steps=2", "train.warmup=1", "--json"], '"exit":0'),
    (["cockpit", "runs"], "ended"),
    (["engine", "completion", "bash"], "deepseek-v3"),
]


class Installed:
    """A fresh virtual environment in which the wheel is installed, and an empty working directory for the installed
    commands."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        venv.create(folder / "venv", with_pip=True)
        constraints = ["-c", str(ROOT / "constraints.txt")]
        torch = next(
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
        )
        # torch first, as in the Makefile
        for wanted in (
            torch,
            f"train-cockpit[{EXTRAS}] @ {wheel.as_uri()}",
        ):
            self.run(
                "python",
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                wanted,
                *constraints,
            )

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        outside = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COCKPIT"))
        }
        return subprocess.Popen(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.work,
            env=outside | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> str:
        print("$", " ".join(words), flush=True)
        process = self.start(*words)
        output = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{output}\nexit {process.returncode}: {' '.join(words)}")
        return output


def check_origin(installed: Installed) -> None:
    """Check that the packages are imported from the fresh environment, and that their import loads neither torch nor
    textual."""
    found = installed.run(
        "python",
        "-c",
        "import agents, cockpit, engine, sys; print(agents.__file__, cockpit.__file__, engine.__file__); "
        "assert not {'torch', 'textual'} & sys.modules.keys()",
    ).split()
    assert all(str(installed.bin.parent) in path for path in found), found
    assert (installed.bin.parent / "share" / "man" / "man1" / "cockpit.1").is_file()


def check_demo(installed: Installed) -> None:
    """Check that `cockpit demo` opens its screen with its style sheet, and that the simulated run advances."""
    words = ("cockpit", "demo", "--simulate", "deepseek-v3", "--speed", "20", "--scenario", "straggler")
    print("$", " ".join(words), flush=True)
    demo = installed.start(*words, **HEADLESS)
    deadline = time.monotonic() + DEADLINE_S
    while _steps(installed) < 3 and time.monotonic() < deadline and demo.poll() is None:
        time.sleep(1.0)
    steps = _steps(installed)
    demo.send_signal(signal.SIGTERM)
    output = demo.communicate()[0]
    assert steps >= 3, f"{steps} steps\n{output}"
    assert demo.returncode == 128 + signal.SIGTERM, output


def _steps(installed: Installed) -> int:
    """The latest step of the live run; 0 if there is none yet."""
    process = installed.start("cockpit", "snapshot", "--json")
    text = process.communicate()[0]
    summary = None if process.returncode else json.loads(text)["summary"]
    return summary["step"] if summary else 0


def main(arguments: Sequence[str]) -> None:
    wheels = sorted(Path(arguments[0]).resolve().glob("*.whl"))
    assert len(wheels) == 1, f"one wheel is needed in {arguments[0]}, found {wheels}"
    with tempfile.TemporaryDirectory(prefix="train-cockpit-") as folder:
        installed = Installed(wheels[0], Path(folder))
        check_origin(installed)
        for words, text in COMMANDS:
            output = installed.run(*words)
            assert text in output, f"{text!r} is missing in the output of {' '.join(words)}:\n{output}"
        check_demo(installed)
    print(f"{wheels[0].name}: {len(COMMANDS) + 2} checks passed")


if __name__ == "__main__":
    main(sys.argv[1:])
