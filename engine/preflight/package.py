"""Checks that `import agents` finds this project's package and not openai-agents, which has the same import name.

Runs before any import of `agents`, so it must not import modules of this project.
"""

import sys
from importlib import util
from pathlib import Path

SIGNATURE = b"Transports telemetry from a training run"  # first words of agents/__init__.py


def package_refusal() -> str | None:
    """An error message if `import agents` does not find this project's package, else None."""
    found = util.find_spec("agents")
    origin = Path(found.origin) if found and found.origin else None
    if origin and origin.is_file() and SIGNATURE in origin.read_bytes()[:200]:
        return None
    where = origin or "nothing"
    return (
        f"`import agents` must find train-cockpit's package, but finds {where}; openai-agents has the same name; "
        "install train-cockpit in an environment of its own"
    )


def exit_unless_ours() -> None:
    """If `import agents` does not find this project's package, print one sentence on stderr and exit with status 2."""
    if why := package_refusal():
        sys.stderr.write(f"{why}\n")
        raise SystemExit(2)
