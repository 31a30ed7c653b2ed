"""``cockpit export`` and ``cockpit serve``, and the table of export formats."""

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from agents.recording.format import RecordingError
from agents.rundir.standard_streams import output_failure
from agents.transport.addresses import every_address
from cockpit.data import format
from cockpit.data.sources.connection import CockpitError
from cockpit.data.sources.recorded import folder_of, open_recording
from cockpit.printing import print_json, print_line, report_missing

EXTRA = "train-cockpit[export]"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Format:
    """An export format: the function that writes a file in this format, what the function counts (such as rows), and
    the library that it needs."""

    module: str
    function: str
    unit: str
    folder: bool  # writes several files into a folder; otherwise one file or standard output
    needs: str = ""


FORMATS = {
    "ndjson": Format("files", "to_ndjson", "updates", folder=False),
    "csv": Format("files", "to_csv", "rows", folder=True),
    "parquet": Format("files", "to_parquet", "rows", folder=True, needs="pyarrow"),
    "prometheus": Format("prometheus", "to_prometheus", "samples", False, "prometheus_client"),
    "tensorboard": Format("curves", "to_tensorboard", "numbers", folder=True, needs="tensorboard"),
    "wandb": Format("curves", "to_wandb", "steps", folder=True, needs="wandb"),
}


@contextmanager
def needing(library: str, what: str, extra: str = EXTRA) -> Iterator[None]:
    """Context manager that replaces an ImportError for `library` with a CockpitError that names the extra to
    install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not library or (error.name or "").partition(".")[0] != library:
            raise
        raise CockpitError(f"{what} needs {library}; install it with pip install '{extra}'") from None


def export(run: str | None, form: str, out: Path | None, as_json: bool) -> int:
    """Write the recording of a run, up to its current end, in the format `form`."""
    made = FORMATS[form]
    recording = open_recording(run)
    where = out
    if made.folder:
        where = out or folder_of(run) / "export" / form
    try:
        if made.folder and where:
            where.mkdir(parents=True, exist_ok=True)
        with needing(made.needs, f"the format {form}"):
            write: Callable[[object, Path | None], int] = getattr(
                import_module(f"cockpit.export.{made.module}"), made.function
            )
            count = write(recording, where)
    except RecordingError as error:
        raise CockpitError(str(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        if where is None and output_failure(error):
            raise  # the command's entry reports it
        name = error.filename or where or "standard output"
        raise CockpitError(f"{name} cannot be written: {error.strerror}") from None
    finally:
        recording.close()
    if where is not None:
        record = {"format": form, "out": str(where), made.unit: count, "missing": recording.damage}
        text = f"{format.grouped(count)} {made.unit} in {where}"
        if as_json:
            print_json(record)
        else:
            print_line(text)
    return report_missing(recording.damage)


def listen_address(text: str) -> tuple[str, int]:
    """Parse an address to listen on, such as ``9464``, ``127.0.0.1:9464`` or ``[::1]:9464``. Raises CockpitError for a
    wildcard or a malformed address."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") if colon else LOOPBACK
    legal = "legal: PORT, which listens on the loopback address, or ADDRESS:PORT"
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        raise CockpitError(f"cannot listen on {text[:60]}; {legal}") from None
    if not 0 <= number < 65536:
        raise CockpitError(f"{number} is not a port; {legal}")
    if every_address(host):
        raise CockpitError(f"{host} would listen on every network without a key; name one address")
    return host, number


def serve(run: str | None, prometheus: str) -> int:
    """Serve the metrics of a live run to Prometheus."""
    host, port = listen_address(prometheus)
    with needing("prometheus_client", "serving Prometheus"):
        from cockpit.export.prometheus import serve as serve_run

    def started(port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        print_line(f"http://{shown}:{port}/metrics")

    return serve_run(run, host, port, started)
