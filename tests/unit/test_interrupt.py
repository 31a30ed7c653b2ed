"""Ctrl-C ends `engine` and `cockpit` with exit status 130 and no traceback, also while their modules are loading."""

from types import ModuleType
from typing import NoReturn

import pytest

import cockpit.__main__ as cockpit
import engine.__main__ as engine


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("program", [engine, cockpit], ids=["engine", "cockpit"])
@pytest.mark.parametrize("loading", [True, False], ids=["loading", "running"])
def test_an_interrupt_has_no_traceback(
    program: ModuleType, loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = program.__name__.partition(".")[0]
    during = "engine.preflight.package.exit_unless_ours" if loading else f"{name}.cli.main.main"
    monkeypatch.setattr(during, interrupt)
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 130 and end.value.__suppress_context__
