"""Whether `agents` is ours: another well-known package, openai-agents, is imported under the same name.

Asked before anything of `agents` is imported, so this imports nothing of ours.
"""

import sys
from importlib import util
from pathlib import Path

SIGN = b"Carries telemetry out of a training run"  # how our agents/__init__.py begins


def package_refusal() -> str | None:
    """One sentence where `import agents` finds another package, or one that was installed over ours; else None."""
    found = util.find_spec("agents")
    origin = Path(found.origin) if found and found.origin else None
    if origin and origin.is_file() and SIGN in origin.read_bytes()[:200]:
        return None
    where = origin or "nowhere"
    return (
        f"`import agents` does not find train-cockpit's package but another ({where}), such as that of openai-agents, "
        "which has the same name; install train-cockpit in an environment of its own"
    )


def exit_unless_ours() -> None:
    """The sentence on stderr and exit 2."""
    if why := package_refusal():
        sys.stderr.write(f"{why}\n")
        raise SystemExit(2)
