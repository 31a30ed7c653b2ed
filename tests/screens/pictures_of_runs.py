"""Draws the pictures of docs/train: screens of real runs on two ranks, replayed from their recordings, as SVG.

    python -m tests.screens.pictures_of_runs [FOLDER]      (default docs/pictures; about two minutes)

The runs are real training runs of a smaller variant of the demo layout, so the numbers in the pictures differ a little
from machine to machine.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from textual.pilot import Pilot

from agents.recording.reader import Recording
from cockpit.data.sources.playback import Playback
from cockpit.tui.replay import ReplayApp
from cockpit.tui.screens.curves import Curves
from tests.screens.driver import until

ROOT = Path(__file__).parents[2]
SIZE = (120, 36)
CHANGE = 60
SMALL = (
    *("model.layers=2", "grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "grid.dp_replicate=2"),
    *("train.zero=0", "train.global_batch=16", "knobs.micro_batches=1"),
)
SHARDS = {"docs": "docs/train/*.md", "code": "engine/*/*.py", "held-out": "docs/screens/*.md"}


@dataclass(frozen=True)
class Picture:
    """A picture of a run of the demo layout with `overrides`. `keys`: the keys that open the screen to draw, pressed
    when the run has ended. `curves`: the charts to show on the curves screen. `change`: the knob changes that `cockpit
    set` makes at step CHANGE."""

    overrides: tuple[str, ...]
    keys: tuple[str, ...]
    curves: tuple[str, ...] = ()
    change: tuple[str, ...] = ()


DATA = (
    *("train.steps=120", "data.source=shards", 'data.shards=["docs", "code"]', "data.weights=[3.0, 1.0]"),
    *("data.separate_documents=true", "data.reset_positions=true"),
    *("validation.every=10", 'validation.shards=["held-out"]', "train.ema=0.9"),
    *("train.lr_schedule=wsd", "train.warmup=15", "train.decay=30"),
    *(
        "sample.every=40",
        'sample.prompt="The run "',
        "sample.tokens=48",
        "sample.temperature=0.5",
        "sample.seed=4",
    ),
)
PICTURES = {
    "precision": Picture(
        ("train.steps=80", "train.precision=fp16", f"loss_scale.initial={2.0**24}", "loss_scale.interval=20"),
        ("6",),
        ("loss", "grad_norm", "loss_scale", "skipped_steps"),
    ),
    "data": Picture(DATA, ("6",), ("loss", "validation_loss", "lr")),
    "sampling": Picture(DATA, ("8", "v", "v", "v", "v", "z")),
    "compression-live": Picture(
        ("train.steps=160",),
        ("6",),
        ("loss", "replica_bytes", "grad_norm"),
        ("compression=top_k", "compression_ratio=0.05"),
    ),
}


def run(folder: Path, picture: Picture) -> Path:
    """Train in `folder` until the end. Returns the folder of the run."""
    command = ["-m", "engine", "run", str(ROOT / "layouts" / "demo.toml"), "run.dir=runs", "--json"]
    engine = subprocess.Popen(
        [sys.executable, *command, *SMALL, *picture.overrides], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout
    where = folder
    for line in engine.stdout:
        event = json.loads(line)
        if event["event"] == "start":
            where = folder / event["folder"]
        if picture.change and event.get("step") == CHANGE:
            change = ["-m", "cockpit", "set", *picture.change, "--run", str(where), "--wait"]
            subprocess.run([sys.executable, *change], cwd=folder, check=True, capture_output=True)
    assert engine.wait() == 0, picture
    return where


async def draw(name: str, where: Path, out: Path) -> None:
    picture, recording = PICTURES[name], Recording(where / "run.db")
    app = ReplayApp(Playback(recording, where.name, begin=recording.at_end()), folder=where)
    async with app.run_test(size=SIZE) as pilot:
        await until(app, pilot, lambda: app.store.summary is not None)
        for key in picture.keys:
            await pilot.press(key)
            await still(app, pilot)
        if isinstance(app.screen, Curves):
            app.screen.charts.choose(picture.curves)
            await still(app, pilot)
        (out / f"{name}.svg").write_text(app.export_screenshot(title="cockpit"), encoding="utf-8")
    print(out / f"{name}.svg", flush=True)


async def still(app: ReplayApp, pilot: Pilot[None]) -> None:
    """Refresh the app from the store for half a second, because the app reads the curves from the recording in the
    background."""
    end = time.monotonic() + 0.5
    await until(app, pilot, lambda: time.monotonic() > end)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        for shard, files in SHARDS.items():
            words = [*map(str, sorted(ROOT.glob(files))), "--tokenizer", "bytes", "--out", shard]
            subprocess.run(
                [sys.executable, "-m", "engine", "tokenize", *words],
                cwd=folder,
                check=True,
                capture_output=True,
            )
        done: dict[Picture, Path] = {}
        for name, picture in PICTURES.items():
            same = next((other for other in done if other.overrides == picture.overrides), None)
            done[picture] = done[same] if same else run(folder, picture)
            asyncio.run(draw(name, done[picture], out))


if __name__ == "__main__":
    main()
