"""Runs a module with some constants changed, so that timeouts that normally last minutes expire in less than a second.

python -m tests.faults.scaled agents.hub.process agents.hub.telemetry.membership.LOST_AFTER_S=0.5 -- --run r --dir DIR
"""

import importlib
import sys
from collections.abc import Mapping

Constants = Mapping[str, float]


def program(module: str, constants: Constants) -> list[str]:
    """The command that runs `module` with `constants`, such as
    ``{"agents.hub.telemetry.membership.LOST_AFTER_S": 0.5}``."""
    changed = [f"{name}={value!r}" for name, value in constants.items()]
    return [sys.executable, "-m", "tests.faults.scaled", module, *changed, "--"]


def main() -> None:
    end = sys.argv.index("--")
    module, changed, sys.argv[1:] = sys.argv[1], sys.argv[2:end], sys.argv[end + 1 :]
    for change in changed:
        name, _, value = change.partition("=")
        home, _, constant = name.rpartition(".")
        owner = importlib.import_module(home)
        kind = type(getattr(owner, constant))  # fails if a constant was renamed
        setattr(owner, constant, kind(float(value)))
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
