"""Prints the output of `engine run`, as NDJSON or as aligned lines of text. Rank 0 prints one line per step."""

import mmap
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agents.protocol import Summary, spell
from engine.config.grid import ORDER
from engine.config.layout import Layout

if TYPE_CHECKING:
    from engine.checkpoint.save import Saved
    from engine.launch.restarts.restart import Restart, Restarted
    from engine.train.text_samples import TextSample


UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))  # smaller sizes are fractions of a MiB


class Progress:
    """Number of steps and last loss of the run, in memory that rank 0 shares with its parent."""

    _FORM = struct.Struct("<qd")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._FORM.size)
        self.write(0, float("nan"))

    def write(self, steps: int, loss: float) -> None:
        self._FORM.pack_into(self._memory, 0, steps, loss)

    def read(self) -> tuple[int, float | None]:
        """The number of steps done and the last loss (None before the first step)."""
        steps, loss = self._FORM.unpack_from(self._memory)
        return steps, loss if steps else None


class Output:
    """Prints the output of `engine run`: the start and the end of the run, and each step, saved checkpoint and
    generated text. Rank 0 calls `start`, `step`, `saved` and `sample`; the process that knows the exit status calls
    `begin` and `end`. `copy_to` begins to copy the output to a file in the folder that it gets."""

    def __init__(
        self,
        layout: Layout,
        as_json: bool,
        copy_to: Callable[[Path], None] = lambda _: None,
        simulated: bool = False,
    ):
        self._layout, self._json, self._simulated = layout, as_json, simulated
        self._copy_to = copy_to
        self._progress = Progress()
        self._folder: Path | None = None
        self._began = time.monotonic()
        self._knobs: dict[str, Any] = {}

    def begin(self, folder: Path) -> None:
        """Set the run's folder and begin to copy the output to a file in this folder. Call this before the ranks
        start."""
        self._folder = folder
        self._copy_to(folder)

    @property
    def _where(self) -> dict[str, str]:
        """The run's name and folder, as fields of an event."""
        return {"run": self._folder.name, "folder": str(self._folder)} if self._folder else {}

    def start(self, run: str, resumed: int | None = None) -> None:
        grid = self._layout.ranks
        if self._json:
            sizes = msgspec.structs.asdict(self._layout.grid)
            event = {"event": "start", "run": run, "world": grid.world, "grid": sizes, "resumed": resumed}
            event["simulated"] = self._simulated
            _line(event | self._where)
            return
        sizes = {axis: getattr(grid, axis) for axis in (*ORDER, "ep")}
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        ranks = f"{grid.world} ranks, {shown}" if shown else "one rank"
        mark = "SIMULATED " * self._simulated
        _say(f"{mark}{run}: {ranks}, {self._layout.schedule.name}")
        if self._folder:
            _say(f"folder {self._folder}")
        if resumed is not None:
            _say(f"resumed at step {resumed}")
        _say("  step      loss  grad norm   ms/step     tok/s   bubble (bound)   all-to-all   dropped")

    def restart(self, layout: Layout, restart: "Restart") -> None:
        """Report that the ranks start again, and use `layout` for the output of the steps that follow. The parent calls
        this before it starts the ranks."""
        self._layout = layout
        if self._json:
            lost = restart.lost_steps
            _line({"event": "restart", "number": restart.number, "cause": restart.cause, "why": restart.why,
                   "lost_steps": lost, "world": layout.ranks.world} | self._where)  # fmt: skip
        else:
            _say(f"restart {restart.number}: {restart.why}")

    def restarted(self, restarted: "Restarted") -> None:
        if self._json:
            _line({"event": "restarted"} | msgspec.to_builtins(restarted))
        else:
            _say(f"        {restarted}")

    def step(self, summary: Summary) -> None:
        loss, norm, rate = summary.loss, summary.grad_norm, summary.tokens_per_s
        sent, dropped = summary.a2a_bytes, summary.dropped
        assert loss is not None and sent is not None and None not in (norm, rate, dropped), "always sent"
        self._progress.write(summary.step + 1, loss)
        if self._json:
            _line(event_of(summary))
            return
        if self._knobs and summary.knobs != self._knobs:
            turned = [
                f"{name} {spell(self._knobs[name])} -> {spell(value)}"
                for name, value in summary.knobs.items()
                if value != self._knobs[name]
            ]
            _say(f"        revision {summary.revision}: {', '.join(turned)}")
        self._knobs = summary.knobs
        if summary.skipped:
            scale = "" if summary.loss_scale is None else f" at loss scale {summary.loss_scale:g}"
            _say(f"        step {summary.step} skipped: its gradient is not finite{scale}")
        bubble = "      ·   (   · )"
        if summary.bubble is not None and summary.bubble_bound is not None:
            bubble = f"{100 * summary.bubble:5.1f} % ({100 * summary.bubble_bound:4.1f} %)"
        _say(
            f"{summary.step:6d} {loss:9.4f} {norm:10.3f} {summary.step_ms:9,.0f}"
            f" {rate:9,.0f} {bubble} {_size(sent)} {dropped:9,d}"
        )
        if summary.validation_loss is not None:
            _say(f"        validation loss {summary.validation_loss:.4f}")

    def saved(self, saved: "Saved") -> None:
        if self._json:
            folder = None if saved.why else str(saved.folder)
            _line(
                {
                    "event": "checkpoint",
                    "step": saved.step,
                    "folder": folder,
                    "bytes": saved.bytes,
                    "seconds": saved.seconds,
                    "why": saved.why or None,
                }
            )
        else:
            _say(f"        {saved}")

    def sample(self, sample: "TextSample") -> None:
        """Print text generated by the model, with a vertical bar before each line."""
        if self._json:
            _line({"event": "sample", "step": sample.step, "text": sample.text} | sample.report.facts)
            return
        _say(f"        sample after step {sample.step}: {sample.report}")
        for line in sample.text.split("\n"):
            _say(f"        | {line}")

    def end(self, status: int) -> None:
        steps, loss = self._progress.read()
        wall = round(time.monotonic() - self._began, 3)
        if self._json:
            event = {"event": "end", "steps": steps, "loss": loss, "wall_s": wall, "exit": status}
            _line(event | self._where)
        else:
            last = f", loss {loss:.4f}" if loss is not None else ""
            where = f"; run {self._folder.name} in {self._folder}" if self._folder else ""
            _say(f"{steps} step{'s' * (steps != 1)} in {wall:.1f} s{last}{where}")


def event_of(summary: Summary) -> dict[str, Any]:
    """The step event that `engine run --json` prints."""
    event = {"event": "step"} | msgspec.structs.asdict(summary)
    event["comm"] = {axis: msgspec.structs.asdict(traffic) for axis, traffic in summary.comm.items()}
    return event


def _line(event: dict[str, Any]) -> None:
    _say(msgspec.json.encode(event).decode())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _size(count: int) -> str:
    """A number of bytes in 12 columns: ``    7.88 MiB``, ``    3.50 TiB``."""
    size, unit = next((one for one in UNITS if count >= one[0]), UNITS[-1])
    return f"{count / size:8.2f} {unit}"
