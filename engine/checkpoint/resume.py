"""Where a run goes on: which checkpoint, in which folder, and with which values of the knobs. Torch-free.

Everything of a layout may differ from the checkpoint's but the model, the data, the seed and the optimizer.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from agents.protocol import Value, spell
from engine.checkpoint.folders import (
    MANIFEST,
    Checkpoint,
    IncompleteError,
    checkpoints_folder,
    damage,
    foreign,
    is_named_so,
    read,
    whole,
)
from engine.config.layout import Layout
from engine.config.refusal import LayoutError, shown
from engine.config.toml import check_layout

# Knobs whose start value a layout keeps elsewhere than under its own name in [knobs].
_HOMES = {"grad_clip": ("train", "grad_clip"), "schedule": ("schedule", "name"), "zero": ("train", "zero")}
_SAME = ("model", "data.tokenizer", "run.seed", "train.optimizer")


@dataclass(frozen=True)
class Start:
    """How a run begins. Without a checkpoint: at its first step."""

    layout: Layout  # with the knobs as the checkpoint's run had turned them
    run_dir: Path | None  # the folder of the run that goes on; None: the run is a new one
    checkpoint: Checkpoint | None = None


def home(knob: str) -> tuple[str, str]:
    """Section and key of a layout that hold the knob's start value."""
    return _HOMES.get(knob, ("knobs", knob))


def start_value(layout: Layout, knob: str) -> Value:
    section, key = home(knob)
    value: Value = getattr(getattr(layout, section), key)
    return value


def turned(layout: Layout, values: Mapping[str, Value]) -> Layout:
    """The layout with other start values of knobs; LayoutError if they do not go with the rest of it."""
    return check_layout(_laid_over(layout, values))


def _laid_over(layout: Layout, values: Mapping[str, Value]) -> Layout:
    """The same, unchecked; KeyError or ValidationError for a knob or a type of value that a layout does not have."""
    tree = msgspec.to_builtins(layout)
    for knob, value in values.items():
        section, key = home(knob)
        tree[section][key]  # must be there
        tree[section][key] = value
    return msgspec.convert(tree, Layout)


def started(environ: Mapping[str, str], parent: int) -> float:
    """When this run began, seconds since the epoch: under torchrun, which may start ranks again, when that did."""
    return psutil.Process(parent).create_time() if "TORCHELASTIC_RUN_ID" in environ else time.time()


def restarted(environ: Mapping[str, str]) -> bool:
    """Whether torchrun starts these ranks again, since one has died."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def find_start(
    layout: Layout,
    resume: bool | Path,
    run_dir: Path | None,
    named: Path,
    again: bool,
    fixed: Collection[str] = (),
    tell: Callable[[str], None] = lambda _: None,
    damage: Callable[[Path], str | None] = damage,
    data: str | None = None,
) -> Start:
    """The start that was asked for; LayoutError, one sentence, if there is none.

    `resume`: True goes on with the run whose folder is `run_dir`, or else with the newest of this name; a path begins
    a run from the newest whole checkpoint found there. `again`: torchrun has restarted the ranks, so the run in
    `run_dir` or `named` continues, from step 0 if it has no checkpoint yet. `fixed` are keys set on the command
    line, such as ``knobs.micro_batches``, whose values in `layout` take precedence over the checkpoint's: always where
    a run starts from a path, elsewhere if the run did not start with them. `tell` hears, in a sentence each, of
    checkpoints that are passed over and of turned knobs whose value `layout` does not take. `damage` says what is wrong
    with the content of a checkpoint. `data` is the digest of the text that the run is to train on, where it is known.
    """

    def begin(checkpoint: Checkpoint, run_dir: Path | None, new: bool = False) -> Start:
        return _from(checkpoint, layout, run_dir, fixed, data, tell, new)

    def torn(why: str) -> None:
        tell(f"passed over: {why}")

    def newest(checkpoints: list[Checkpoint]) -> Checkpoint | None:
        for checkpoint in reversed(checkpoints):
            if not (why := _strange_knobs(checkpoint) or damage(checkpoint.folder)):
                return checkpoint
            torn(why)
        return None

    own = run_dir or named
    kept = whole(checkpoints_folder(layout, own), torn)
    if again and (found := newest(kept)):
        return begin(found, own)
    if kept and resume is not True:
        raise LayoutError(
            f"{own} holds checkpoints up to {kept[-1].folder.name}; "
            "go on from there with --resume, or choose another folder"
        )
    if not kept and resume is not True and (others := foreign(checkpoints_folder(layout, own))):
        raise LayoutError(
            f"{others[-1]} is in the format of another engine; choose another folder for the run"
        )
    if isinstance(resume, Path):
        begun = _there(resume, torn, newest, damage)
        return begin(_unfinished(begun, layout), run_dir, new=True)
    if not resume or (again and not kept):
        return Start(layout, run_dir)
    here = bool(run_dir) or again
    for folder in [own] if here else reversed(_folders_of(layout)):
        if found := newest(kept if here else whole(checkpoints_folder(layout, folder), torn)):
            return begin(_unfinished(found, layout), folder)
    where = str(run_dir) if run_dir else f"the folders {layout.run.dir}/{layout.run.name}-*"
    raise LayoutError(f"there is nothing to resume: no whole checkpoint in {where}")


def _folders_of(layout: Layout) -> list[Path]:
    """All folders of runs of this name, oldest first."""
    made = re.compile(re.escape(layout.run.name) + r"-\d{8}-\d{6}(-\d+)?")
    found = [path for path in Path(layout.run.dir).glob(f"{layout.run.name}-*") if made.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name)


def _there(
    folder: Path,
    torn: Callable[[str], None],
    newest: Callable[[list[Checkpoint]], Checkpoint | None],
    damage: Callable[[Path], str | None],
) -> Checkpoint:
    """The one to begin from, in a checkpoint's own folder, a shelf, or a run's folder."""
    if not folder.is_dir():
        raise LayoutError(f"there is nothing to resume: {folder} is no folder")
    if found := newest(whole(folder, torn) or whole(folder / "checkpoints", torn)):
        return found
    if not is_named_so(folder) and not (folder / MANIFEST).exists():
        raise LayoutError(f"there is nothing to resume: no whole checkpoint in {folder}")
    try:
        checkpoint = read(folder)
        if why := _strange_knobs(checkpoint) or damage(folder):
            raise IncompleteError(why)
    except IncompleteError as torn_why:
        raise LayoutError(f"there is nothing to resume: {torn_why}") from None
    return checkpoint


def other_data(checkpoint: Checkpoint, layout: Layout, data: str) -> str | None:
    """Why a run on the text whose digest is `data` does not go on from `checkpoint`, in a sentence, or None."""
    if data in (checkpoint.manifest.data, layout.data.digest):
        return None
    return (
        f"{checkpoint.folder} was trained on another text: it had the digest {checkpoint.manifest.data}, and what "
        f"data.source = {shown(layout.data.source)} names here has {data} (other files, or for stdlib another release "
        f"of Python); legal: the text it began with, or data.digest={data} to go on with this one"
    )


def _strange_knobs(checkpoint: Checkpoint) -> str | None:
    """Why no run can have saved these knobs, in a sentence, or None."""
    for knob, value in checkpoint.manifest.knobs.items():
        try:
            _laid_over(checkpoint.manifest.layout, {knob: value})
        except (KeyError, msgspec.ValidationError):
            return f"{checkpoint.folder} is damaged: a layout has no {shown(knob)} = {shown(value)}"
    return None


def _unfinished(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    if checkpoint.manifest.step >= layout.train.steps:
        raise LayoutError(
            f"{checkpoint.folder} is of step {checkpoint.manifest.step}, and train.steps = {layout.train.steps}; "
            "legal: more than that"
        )
    return checkpoint


def _from(
    checkpoint: Checkpoint,
    layout: Layout,
    run_dir: Path | None,
    fixed: Collection[str],
    data: str | None,
    tell: Callable[[str], None],
    new: bool,
) -> Start:
    manifest = checkpoint.manifest
    theirs, ours = _flat(manifest.layout), _flat(layout)
    for key in theirs | ours:
        if key.startswith(_SAME) and theirs.get(key) != ours.get(key):
            raise LayoutError(
                f"{checkpoint.folder} has {key} = {spell(theirs.get(key))}, the layout says {spell(ours.get(key))}; "
                "a run goes on with the model, tokenizer, seed and optimizer it began with"
            )
    if data and data != manifest.data:
        if refusal := other_data(checkpoint, layout, data):
            raise LayoutError(refusal)
        tell(
            f"{checkpoint.folder} goes on with another text than it was trained on, as data.digest = {data} says"
        )
    # What an operator turned stays turned; what nobody touched is as the layout says. The command that began the run,
    # given again, turns nothing back: torchrun gives it at each restart. That of a new run means what it says.
    carried = {}
    for knob, value in manifest.knobs.items():
        began, now = start_value(manifest.layout, knob), start_value(layout, knob)
        meant = ".".join(home(knob)) in fixed and (new or now != began)
        if value != began and not meant:
            carried[knob] = value
    return Start(_as_far_as_legal(checkpoint, layout, carried, tell), run_dir, checkpoint)


def _as_far_as_legal(
    checkpoint: Checkpoint, layout: Layout, values: Mapping[str, Value], tell: Callable[[str], None]
) -> Layout:
    """The layout with those values of knobs: all, or, where they do not go with it, one after the other what does."""
    legal, left = layout, dict(values)
    with suppress(LayoutError):
        return turned(layout, left)
    why: dict[str, LayoutError] = {}
    for knob in [*left] * len(left):  # one may become legal by another
        if knob in left:
            try:
                legal = turned(legal, {knob: left[knob]})
                del left[knob]
            except LayoutError as error:
                why[knob] = error
    for knob, value in left.items():
        key, ours = ".".join(home(knob)), spell(start_value(layout, knob))
        tell(f"{checkpoint.folder} goes on with {key} = {ours} instead of {spell(value)}: {why[knob]}")
    return legal


def _flat(layout: Layout) -> dict[str, Any]:
    """Dotted key -> value."""
    flat: dict[str, Any] = {}

    def add(at: str, tree: Any) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                add(f"{at}.{key}" if at else key, value)
        else:
            flat[at] = tree

    add("", msgspec.to_builtins(layout))
    return flat
