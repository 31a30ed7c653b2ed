"""A driver's cases in two processes at once: ranks wait for each other half of the time."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def in_halves(module: str, folder: Path, names: list[str], timeout_s: float) -> None:
    """Run `python -m MODULE FOLDER NAME ...` for all `names`; each process imports torch once."""
    command = [sys.executable, "-W", "ignore", "-m", module, str(folder)]
    drivers = [
        subprocess.Popen(
            [*command, *half], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for half in (names[::2], names[1::2])
    ]
    try:
        for driver in drivers:
            _, errors = driver.communicate(timeout=timeout_s)
            assert driver.returncode == 0, errors[-4000:]
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
