"""Runs at the start of each Python process of a wrapped command, in place of the user's sitecustomize, and then runs
the user's sitecustomize.

Uses only the standard library. As soon as the program has imported torch, the hooks of `agents.wrap.hooks` are
installed. A program that does not import torch is not changed.
"""

import atexit
import contextlib
import importlib
import importlib.util
import os
import select
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1]  # the folder `agents`
NEEDED = ("msgspec", "zmq", "psutil")
WATCHED = "COCKPIT_WRAP"  # set by `cockpit wrap`


class TorchImport:
    """A finder at the start of `sys.meta_path`. For torch, it returns the spec that the other finders return, with a
    loader that installs the hooks after it has executed torch.

    A program may ask for torch's spec without importing torch (`importlib.util.find_spec("torch")`), so the finder
    stays in place until torch has been executed.
    """

    def __init__(self) -> None:
        self._waiting = True  # until torch has been executed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch" or not self._waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for one in others if (found := one.find_spec(name, path, target))), None)
        loader = spec.loader if spec else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            del loader.exec_module  # restores the loader's own method
            execute(module)
            if self._waiting:  # otherwise another loader has executed torch already
                self._waiting = False
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                _watch()

        with contextlib.suppress(
            AttributeError
        ):  # a custom loader without an instance dictionary; see `at_exit`
            loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec

    def at_exit(self) -> None:
        """Report at the end of the process that torch was imported in a way that this finder cannot follow."""
        if self._waiting and hasattr(sys.modules.get("torch"), "_C"):
            _say("torch was imported by a loader that cannot be followed")


def _watch() -> None:
    try:
        why = _missing()
        if why:
            return _say(why)
        from agents.wrap.watch import install

        return install()
    except Exception as error:  # noqa: BLE001 - the program must run as without the cockpit
        return _say(f"{type(error).__name__}: {error}")


def _missing() -> str:
    """Why `agents` cannot be loaded in this process, for example because a dependency is missing; "" if it can."""
    found = importlib.util.find_spec("agents")
    places = [Path(place).resolve() for place in (found.submodule_search_locations or ())] if found else []
    if places and places[0] != PACKAGE:
        return f"the program has another package `agents`, in {places[0]}"
    if not places:
        return f"train-cockpit is not installed for {sys.executable}"
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{sys.executable} lacks {', '.join(lacking)}" if lacking else ""


def _say(why: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0" or sys.stderr is None:
        return
    if select.select([], [sys.stderr], [], 2.0)[1]:  # the program must not wait for the reader of this line
        print(f"cockpit wrap: the program runs without the cockpit: {why}", file=sys.stderr)  # noqa: T201


def _run_next() -> None:
    """Import the user's sitecustomize, which this file shadows, from the other folders in `sys.path`, as `site` would
    do."""
    own = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:  # the import system expects a module under this name
            sys.modules.setdefault("sitecustomize", own)


def _follow() -> None:
    if (
        "torch" in sys.modules
    ):  # too early: the program's own folder, in which `_missing` searches, is not known yet
        return _say("torch was imported before the program started, by a .pth file of its environment")
    finder = TorchImport()
    sys.meta_path.insert(0, finder)
    atexit.register(finder.at_exit)
    return None


if os.environ.get(WATCHED):
    _follow()
_run_next()
