"""``cockpit mirror``: sends each step of a live run to TensorBoard, W&B, MLflow or an OpenTelemetry collector.

Like a screen, a mirror is a client of the hub: if the program that receives the steps is slow or absent, only the
mirror waits.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from agents.protocol import Hello, Summary
from cockpit.data import format
from cockpit.data.link import LinkState
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.data.sources.recorded import folder_of
from cockpit.export.command import needing
from cockpit.export.curves import CurveWriter, TensorBoardWriter, WandbWriter, numbers
from cockpit.printing import print_line

EXTRA = "train-cockpit[export,mirror]"
HZ = 1.0  # how often the hub sends new steps
SILENT_S = 30.0  # the mirror ends when the hub has sent nothing for this long


@dataclass(frozen=True)
class Target:
    """A program to which a run can be mirrored. `open(run, out, hello)` returns the writer and a string that describes
    the writer's destination. `library`: the module that the writer imports. `errors`: the exceptions, as
    ``module:name``, that the writer raises if the program does not accept the steps."""

    open: Callable[[str | None, str | None, Hello], tuple[CurveWriter, str]]
    library: str
    errors: tuple[str, ...] = ()


def _folder(run: str | None, out: str | None, name: str) -> Path:
    """The folder for the mirror's files: `out` or, without `out`, `mirror/<name>` in the run's folder. Raises
    CockpitError if the folder cannot be created."""
    if out is None and run is not None and "://" in run:
        raise CockpitError(f"the folder of {run} is not known here; name one with --out FOLDER")
    folder = Path(out) if out else folder_of(run) / "mirror" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CockpitError(f"{folder} cannot be written: {error.strerror}") from None
    return folder


def _tensorboard(run: str | None, out: str | None, hello: Hello) -> tuple[CurveWriter, str]:
    folder = _folder(run, out, "tensorboard")
    return TensorBoardWriter(folder), f"{folder}; view them with tensorboard --logdir {folder}"


def _wandb(run: str | None, out: str | None, hello: Hello) -> tuple[CurveWriter, str]:
    folder = _folder(run, out, "wandb")
    return WandbWriter(folder, hello, None), f"W&B; its files are in {folder}"


def _mlflow(run: str | None, out: str | None, hello: Hello) -> tuple[CurveWriter, str]:
    from cockpit.export.mirror.mlflow_writer import MlflowWriter

    uri = out or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise CockpitError(
            "name the MLflow server with --out URI or MLFLOW_TRACKING_URI, such as http://localhost:5000"
        )
    return MlflowWriter(uri, hello), f"MLflow at {uri}"


def _otlp(run: str | None, out: str | None, hello: Hello) -> tuple[CurveWriter, str]:
    from cockpit.export.mirror.otlp_writer import OtlpWriter

    where = out or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    return OtlpWriter(out, hello), f"the OpenTelemetry collector at {where}"


TARGETS = {
    "tensorboard": Target(_tensorboard, "tensorboard.summary"),
    "wandb": Target(_wandb, "wandb", ("wandb.errors:Error",)),
    "mlflow": Target(_mlflow, "mlflow", ("mlflow.exceptions:MlflowException",)),
    "otlp": Target(
        _otlp,
        "opentelemetry.exporter.otlp.proto.http.metric_exporter",
        ("cockpit.export.mirror.otlp_writer:OtlpError",),
    ),
}


class _NewSteps:
    """Finds the steps that a connection has received and that have not been mirrored yet. `first`: the first mirrored
    step. `missed`: how many steps after `first` never arrived, because the mirror fell behind by more steps than the
    hub keeps."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last: Summary | None = None
        self.first: int | None = None
        self.missed = 0

    def take(self, rebuilt: bool) -> list[Summary]:
        """The steps to mirror next: those that the last poll received or, if it received a snapshot (`rebuilt`), those
        in the new state that come after the last mirrored step."""
        if rebuilt:
            found = self._connection.store.state.summaries
            if self._last in found:
                found = found[found.index(self._last) + 1 :]
        else:
            found = [update for update in self._connection.last if isinstance(update, Summary)]
        for summary in found:
            if self._last:
                self.missed += max(0, summary.step - self._last.step - 1)
            else:
                self.first = summary.step
            self._last = summary
        return found


def mirror(run: str | None, to: str, out: str | None) -> int:
    """Send the steps of a live run to the program `to` (a key of `TARGETS`), from the oldest step that the hub keeps,
    until the run ends. Returns 0 if the run ended, 1 if it failed. Raises CockpitError if the program does not accept
    the steps."""
    target = TARGETS[to]
    with needing(target.library.partition(".")[0], f"a mirror to {to}", EXTRA):
        import_module(target.library)  # before the connection, because this can take seconds
        errors = tuple(_error(name) for name in target.errors)
    with Connection(run, low_bandwidth=True) as connection:
        connection.client.set_subscription(HZ, ranks=False)
        connection.wait_for_snapshot()
        hello = next(iter(connection.store.state.hellos.values()))
        try:
            writer, where = target.open(run, out, hello)
        except errors as error:
            raise CockpitError(_refusal(to, error)) from None
        print_line(f"the steps of {hello.run} go to {where}")
        try:
            steps, taken = _follow(connection, writer, hello.simulated)
            writer.close()
        except errors as error:
            raise CockpitError(_refusal(to, error)) from None
        since = f", from step {taken.first:,} on" if taken.first is not None else ""
        late = (
            f"; {taken.missed:,} steps are missing, because this mirror was too slow" if taken.missed else ""
        )
        print_line(f"{steps:,} steps written{since}{late}")
        return 0 if connection.store.link is LinkState.ENDED else 1


def _follow(connection: Connection, writer: CurveWriter, simulated: bool) -> tuple[int, _NewSteps]:
    """Write the run's steps with `writer` until the run ends. Returns the number of written steps, and the `_NewSteps`
    that found them."""
    new, steps, rebuilt = _NewSteps(connection), 0, True
    while True:
        found = new.take(rebuilt)
        if found:
            writer.write([(summary, numbers(summary, simulated)) for summary in found])
            steps += len(found)
        if connection.store.link in (LinkState.ENDED, LinkState.FAILED):
            return steps, new
        if (silent_s := connection.store.age_s or 0.0) > SILENT_S:
            writer.close()
            raise CockpitError(f"no message from the hub for {format.age(silent_s)}; {steps:,} steps written")
        rebuilt = connection.poll()


def _error(name: str) -> type[Exception]:
    module, _, kind = name.partition(":")
    found: type[Exception] = getattr(import_module(module), kind)
    return found


def _refusal(to: str, error: Exception) -> str:
    why = " ".join(str(error).split())[:200]
    return f"{to} did not accept the steps" + (f": {why}" if why else "")
