"""``cockpit demo``: starts a run on this machine, and shows the run in a cockpit with the role operator."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agents.requests import Request
from agents.rundir.hub_file import read_hub_file
from agents.rundir.run_folder import make_folder, stamped
from agents.rundir.runs import RunError
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import diagnosis
from cockpit.data.link import LinkState
from cockpit.data.sources.connection import CockpitError, runs_dir
from cockpit.data.sources.engine_process import EngineProcess
from cockpit.data.sources.live import LiveSource
from cockpit.data.sources.source import ViewerError, faults_reported
from cockpit.data.store import Store
from cockpit.printing import complain, print_final_summary, print_line
from engine.layouts import find, names

LAYOUT = "layouts/demo.toml"
STEPS = 2000  # number of steps of a simulated run
POLL_S = 0.1
SHOWN_LINES = 12


class DemoSource:
    """The data source of the app for a run that this command starts: waits for the run's hub, then follows the run. If
    the engine fails, the source reports the failure.
    """

    operator = True
    owns_run = True

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.target = engine.folder.name
        self._live: LiveSource | None = None
        self._samples: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, store: Store) -> None:
        self._thread = threading.Thread(target=self._run, args=(store,), name="cockpit-demo", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(2.0)
        if self._live:
            self._live.stop()

    def sample(self, kinds: frozenset[str]) -> None:
        self._samples = kinds
        if self._live:
            self._live.sample(kinds)

    def ask(self, asked: Request) -> None:
        if self._live is None:
            raise ViewerError("the run has not started yet")
        self._live.ask(asked)

    def _run(self, store: Store) -> None:
        with faults_reported(store, f"the run continues: cockpit attach {self.target}"):
            self._follow(store)

    def _follow(self, store: Store) -> None:
        while not self._stop.wait(POLL_S):
            if self._live is None:
                with contextlib.suppress(RunError):
                    self._live = LiveSource(
                        read_hub_file(self.engine.folder).endpoints.clients, operator=True, target=self.target
                    )
                    self._live.sample(self._samples)
                    self._live.start(store)
            status = self.engine.exit_status
            if status:
                last = self.engine.last_lines(1) or ["the engine printed nothing"]
                with store.lock:
                    store.source_error = f"the engine ended with exit {status}: {format.clean(last[0])}"
                return


@dataclass(frozen=True)
class Simulation:
    """Options of `engine simulate`."""

    layout: str  # a TOML file, or the name of a shipped layout
    speed: str = "10"
    scenario: str | None = None
    seed: str | None = None

    @property
    def arguments(self) -> list[str]:
        given = {"--speed": self.speed, "--scenario": self.scenario, "--seed": self.seed}
        return [word for name, value in given.items() if value is not None for word in (name, value)]


def run_demo(words: Sequence[str], simulation: Simulation | None = None) -> int:
    """Start the engine, open the screen, and stop the engine when the screen closes. Returns an exit status. With
    `simulation`, the engine simulates the run, and `words` contains only overrides."""
    from cockpit.tui.app import CockpitApp
    from cockpit.tui.dialogs.starting import Starting
    from cockpit.tui.open import keymap, need_terminal, open_next, report_fault, theme
    from cockpit.tui.settings import save_theme

    if simulation and any("=" not in word for word in words):
        raise CockpitError(
            "give the layout to simulate after --simulate; all other words must be section.key=value"
        )
    layout, arguments = _split(words)
    if simulation:
        layout = _layout_to_simulate(simulation.layout)
        if not any(argument.startswith("train.steps=") for argument in arguments):
            arguments = [f"train.steps={STEPS}", *arguments]  # published layouts do not set a number of steps
        arguments += simulation.arguments
    need_terminal()
    keys, chosen_theme = keymap(), theme()
    folder = make_folder(None, stamped(runs_dir(), layout.stem))
    with _signals_unwind():
        try:
            engine = EngineProcess(layout, arguments, folder, "simulate" if simulation else "run")
        except OSError as error:
            raise CockpitError(f"the engine cannot be started: {error.strerror}") from None
        with engine:
            app = CockpitApp(DemoSource(engine), keymap=keys, theme=chosen_theme, folder=folder)
            app.opening, app.remember_theme = Starting(engine), save_theme
            app.run()
            report_fault(app.store)
            failed = app.return_code or app.store.link is LinkState.FAILED
            if failed:
                engine.stop()  # the ranks are gone; the engine may still print the cause
            status = engine.exit_status
            if status or failed:
                print_final_summary(app.store)
                _print_failure(app.store, engine)
                return status or 1
            if status is None:
                print_line("stopping the run ...")
    print_final_summary(app.store)
    print_line(f"the run's folder is {folder}")
    return open_next(app)


def _print_failure(store: Store, engine: EngineProcess) -> None:
    """Print why the run failed, the last lines that the engine printed, and the path of its log."""
    with store.lock:
        if store.link is LinkState.FAILED:
            complain(f"the run failed: {diagnosis(store).sentence}")
    for line in engine.last_lines(SHOWN_LINES):
        complain(line)
    complain(f"the complete output of the engine is in {engine.log}")


def _split(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Split the arguments ``[LAYOUT] [section.key=value ...]`` into the layout file and the overrides."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise CockpitError(f"two layouts were given, {files[0]} and {files[1]}; give one")
    named = Path(files[0] if files else LAYOUT)
    found = find(named)
    if found is None:
        raise CockpitError(f"there is no layout {named}; name a TOML file such as {LAYOUT}")
    return found, [word for word in words if "=" in word]


def _layout_to_simulate(name: str) -> Path:
    """The layout file to simulate: a TOML file, or a shipped layout that is given by name."""
    found = find(name)
    if found is None:
        raise CockpitError(f"there is no layout {name}; legal: a TOML file, or {', '.join(names())}")
    return found


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Context manager: in its body, SIGTERM and SIGHUP raise SystemExit, so that `finally` blocks stop the engine."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
