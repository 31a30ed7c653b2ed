"""``cockpit mirror``: sends each step of a live run to TensorBoard, W&B, MLflow or an OpenTelemetry collector.

Like a screen, a mirror is a client of the hub: if the program that receives the steps is slow or absent, only the
mirror waits.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from agents.protocol import Hello, Summary
from agents.state.run_state import HISTORY
from cockpit.data import format
from cockpit.data.link import LinkState
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.data.sources.recorded import folder_of
from cockpit.export.command import needing
from cockpit.export.curves import CurveWriter, TensorBoardWriter, WandbWriter, numbers
from cockpit.export.mirror.delivery import Delivery, Refusal
from cockpit.printing import complain, print_line

EXTRA = "train-cockpit[export,mirror]"
HZ = 1.0  # how often the hub sends new steps
LONGEST_REASON = 2000  # characters of a reason that another program gives
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
        ("cockpit.export.mirror.delivery:Refusal",),
    ),
}


class _NewSteps:
    """Finds the steps that a connection has received and that have not been mirrored yet. `first`: the first mirrored
    step. `missed`: how many steps after `first` never arrived, because the mirror fell behind by more steps than the
    hub keeps."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last: Summary | None = None
        # Step and time of the newest mirrored steps. The hub may send a step again, after a lost message for example.
        self._known: dict[tuple[int, float], None] = {}
        self.first: int | None = None
        self.missed = 0

    def take(self, rebuilt: bool) -> list[Summary]:
        """The steps to mirror next: those that the last poll received or, if it received a snapshot (`rebuilt`), those
        in the new state; without those that are already mirrored."""
        received = self._connection.store.state.summaries if rebuilt else self._connection.last
        summaries = [update for update in received if isinstance(update, Summary)]
        found = [one for one in summaries if (one.step, one.time_s) not in self._known]
        for summary in found:
            self._known[summary.step, summary.time_s] = None
            if len(self._known) > 2 * HISTORY:
                del self._known[next(iter(self._known))]
            if self._last:
                self.missed += max(0, summary.step - self._last.step - 1)
            else:
                self.first = summary.step
            self._last = summary
        return found


def mirror(run: str | None, to: str, out: str | None) -> int:
    """Send the steps of a live run to the program `to` (a key of `TARGETS`), from the oldest step that the hub keeps,
    until the run ends. If the program does not accept steps, retry until the run ends. Returns 0 if the run ended and
    all steps are written, otherwise 1. Raises CockpitError if the program cannot be used, or refuses the first steps
    for good."""
    target = TARGETS[to]
    with needing(target.library.partition(".")[0], f"a mirror to {to}", EXTRA):
        import_module(target.library)  # before the connection, because this can take seconds
        errors = tuple(_error(name) for name in target.errors)
    with Connection(run, low_bandwidth=True) as connection:
        connection.client.set_subscription(HZ, ranks=False)
        connection.wait_for_snapshot()
        hello = next(iter(connection.store.state.hellos.values()))
        where = out or to
        try:
            writer, where = target.open(run, out, hello)
        except OSError as error:
            raise _problem(to, where, error) from None
        except errors as error:
            raise _problem(to, where, error) from None
        print_line(f"the steps of {hello.run} go to {where}")
        delivery = Delivery(writer, errors, partial(_report, to))
        try:
            taken = _follow(connection, delivery, hello.simulated)
        except CockpitError:
            delivery.close()
            raise
        delivery.close()
        if isinstance(delivery.failure, OSError | Refusal) and not delivery.outage:
            raise _problem(to, where, delivery.failure) from None
        if (failure := delivery.failure) and not delivery.outage:
            raise failure
        since = f", from step {taken.first:,} on" if taken.first is not None else ""
        missed = taken.missed + delivery.dropped
        late = f"; {missed:,} steps are missing, because this mirror was too slow" if missed else ""
        print_line(f"{delivery.written:,} steps written{since}{late}")
        rejected = getattr(writer, "rejected", 0)
        if delivery.unsent:
            complain(f"{delivery.unsent:,} steps are not written, because {to} did not accept them")
        if rejected:
            complain(f"{to} has rejected {rejected:,} of the values")
        return 0 if connection.store.link is LinkState.ENDED and not (delivery.unsent or rejected) else 1


def _report(to: str, refusal: Refusal | None, seconds: float) -> None:
    """Report the beginning of an outage and, if `refusal` is None, its end after `seconds`."""
    if refusal:
        complain(f"{_problem(to, to, refusal)}; the mirror retries until the run ends")
    else:
        print_line(f"{to} accepts the steps again, after {format.age(seconds)}")


def _follow(connection: Connection, delivery: Delivery, simulated: bool) -> _NewSteps:
    """Deliver the run's steps until the run or the delivery ends. Returns the `_NewSteps` that found them."""
    new, rebuilt = _NewSteps(connection), True
    while True:
        delivery.put([(summary, numbers(summary, simulated)) for summary in new.take(rebuilt)])
        if connection.store.link in (LinkState.ENDED, LinkState.FAILED) or delivery.failure:
            return new
        if (silent_s := connection.store.age_s or 0.0) > SILENT_S:
            raise CockpitError(
                f"no message from the hub for {format.age(silent_s)}; {delivery.written:,} steps written"
            )
        rebuilt = connection.poll()


def _error(name: str) -> type[Exception]:
    module, _, kind = name.partition(":")
    found: type[Exception] = getattr(import_module(module), kind)
    return found


def _problem(to: str, where: str, error: Exception) -> CockpitError:
    """Why the program `to` did not accept the steps. `where`: the place of its files, or its address."""
    if isinstance(error, OSError) and error.strerror:
        return CockpitError(
            f"{error.filename or where.partition(';')[0]} cannot be written: {error.strerror}"
        )
    why = " ".join(str(error).split())
    return CockpitError(f"{to} did not accept the steps" + (f": {_shortened(why)}" if why else ""))


def _shortened(why: str) -> str:
    """A reason of at most `LONGEST_REASON` characters; the middle is left out, because the remedy is often at the
    end."""
    half = LONGEST_REASON // 2
    return why if len(why) <= LONGEST_REASON else f"{why[:half]} … {why[-half:]}"
