"""Decides how a run resumes: from which checkpoint, in which folder, with which knob values. Torch-free.

The layout may differ from that of the checkpoint, but the model, the training text, the tokenizer, the seed and the
optimizer must be the same.
"""

import hashlib
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
from agents.rundir.local_machine import this_machine
from engine.checkpoint.manifest import MANIFEST, Checkpoint, IncompleteError, checkpoints_folder
from engine.checkpoint.reading import (
    complete_checkpoints,
    damage,
    is_checkpoint_name,
    other_format_folders,
    read,
)
from engine.config.knob_values import COMPRESSION_KNOBS
from engine.config.layout import Layout
from engine.config.refusal import LayoutError, shown
from engine.config.relayout import KNOB, layout_text
from engine.config.toml import check_layout

# Knobs whose start value is not in [knobs] under the knob's name, and the section and key that hold it.
_KEYS = {
    "grad_clip": ("train", "grad_clip"),
    "schedule": ("schedule", "name"),
    "zero": ("train", "zero"),
    **{knob: ("compression", key) for knob, key in COMPRESSION_KNOBS.items()},
}
_MUST_MATCH = ("model", "data.tokenizer", "run.seed", "train.optimizer")
# Keys on which weights without optimizer state do not depend.
_OF_TRAINING = ("model.seq_len", "model.moe.drop")


@dataclass(frozen=True)
class Start:
    """How a run starts: its layout, folder and checkpoint. Without a checkpoint, a run starts at step 0."""

    layout: Layout  # has the knob values of the checkpoint, if there is one
    run_dir: Path | None  # the folder of the resumed run; None: the run is a new one
    checkpoint: Checkpoint | None = None


def layout_key(knob: str) -> tuple[str, str]:
    """The section and the key of the layout that set the start value of `knob`."""
    return _KEYS.get(knob, ("knobs", knob))


def start_value(layout: Layout, knob: str) -> Value:
    if knob == KNOB:
        return layout_text(layout)
    section, key = layout_key(knob)
    value: Value = getattr(getattr(layout, section), key)
    return value


def with_knob_values(layout: Layout, values: Mapping[str, Value]) -> Layout:
    """The layout with `values` as the start values of its knobs. Raises LayoutError if the result is not a legal
    layout."""
    return check_layout(_with_unchecked(layout, values))


def _with_unchecked(layout: Layout, values: Mapping[str, Value]) -> Layout:
    """Like `with_knob_values`, but does not check the layout. Raises KeyError for an unknown knob and ValidationError
    for a value of the wrong type."""
    tree = msgspec.to_builtins(layout)
    for knob, value in values.items():
        section, key = layout_key(knob)
        tree[section][key]  # raises KeyError if the layout has no such key
        tree[section][key] = value
    return msgspec.convert(tree, Layout)


def start_time(environ: Mapping[str, str], parent: int) -> float:
    """Start time of this run in seconds since the epoch. Under torchrun, this is the start time of torchrun itself,
    because torchrun may restart ranks."""
    return psutil.Process(parent).create_time() if "TORCHELASTIC_RUN_ID" in environ else time.time()


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether torchrun has restarted these ranks after one of them died, or Slurm has requeued the job."""
    counts = (environ.get(name) or "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)


def number_of_job(environ: Mapping[str, str], parent: int) -> int | None:
    """A number that differs between two jobs that torchrun starts in the same second, and that stays the same if
    torchrun starts the ranks of the job again; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    told = (this_machine(), str(parent), *(environ.get(name, "") for name in names))
    return int.from_bytes(hashlib.blake2b("\0".join(told).encode(errors="replace"), digest_size=5).digest())


def folder_of_job(named: Path, number: int | None, again: bool) -> Path:
    """The path of the folder of a job that torchrun has started: `named` or, if another job of the same second has
    created that folder, `named` with the `number` of this job. `again`: whether the job has created its folder before.
    """
    own = named if number is None else named.with_name(f"{named.name}-{number}")
    return own if (own.is_dir() if again else named.exists()) else named


def find_start(
    layout: Layout,
    resume: bool | Path,
    run_dir: Path | None,
    named: Path,
    restarted: bool,
    fixed: Collection[str] = (),
    warn: Callable[[str], None] = lambda _: None,
    damage: Callable[[Path], str | None] = damage,
    data: str | None = None,
) -> Start:
    """Decide how the run starts, given the arguments of `engine run`. Raises LayoutError if the run cannot start.

    - `resume`: if True, continue the run in `run_dir` or, without `run_dir`, the newest run of this name. If `resume`
      is a path, start a new run from the newest complete checkpoint at that path.
    - `restarted`: whether torchrun, a scheduler or the engine's launcher may have started the ranks before. If True,
      continue the run in `run_dir` or, without `run_dir`, in `named`; a run without a checkpoint starts at step 0.
    - `fixed`: keys set on the command line, such as ``knobs.micro_batches``. In a new run, values set on the command
      line take precedence over the checkpoint's values. In a continued run, a value set on the command line takes
      precedence only if it differs from the value with which the run started.
    - `warn`: called with a message for each skipped checkpoint, and for each knob value of the checkpoint that is not
      legal in `layout`.
    - `damage`: a function that checks the content of a checkpoint, and returns an error message if the checkpoint is
      damaged, else None.
    - `data`: the digest of this run's training text, if known.
    """

    def begin(checkpoint: Checkpoint, run_dir: Path | None, new: bool = False) -> Start:
        return _start_from(checkpoint, layout, run_dir, fixed, data, warn, new)

    def skip(why: str) -> None:
        warn(f"skipped a checkpoint: {why}")

    def newest(checkpoints: list[Checkpoint]) -> Checkpoint | None:
        for checkpoint in reversed(checkpoints):
            if not (why := _invalid_knobs(checkpoint) or damage(checkpoint.folder)):
                return checkpoint
            skip(why)
        return None

    own_dir = run_dir or named
    kept = complete_checkpoints(checkpoints_folder(layout, own_dir), skip)
    if restarted and (found := newest(kept)):
        return begin(found, own_dir)
    if kept and resume is not True:
        raise LayoutError(
            f"{own_dir} already has checkpoints up to {kept[-1].folder.name}; continue from there with "
            f"--resume, or choose another folder"
        )
    if (
        not kept
        and resume is not True
        and (others := other_format_folders(checkpoints_folder(layout, own_dir)))
    ):
        raise LayoutError(
            f"{others[-1]} has the format of another engine version; choose another folder for the run"
        )
    if isinstance(resume, Path):
        chosen = _checkpoint_in(resume, skip, newest, damage)
        return begin(_unfinished(chosen, layout), run_dir, new=True)
    if not resume:
        return Start(layout, run_dir)
    only_own = bool(run_dir)
    for folder in [own_dir] if only_own else reversed(_folders_of(layout)):
        if found := newest(
            kept if only_own else complete_checkpoints(checkpoints_folder(layout, folder), skip)
        ):
            return begin(_unfinished(found, layout), folder)
    if restarted and not kept:
        return Start(layout, run_dir)
    where = str(run_dir) if run_dir else f"the folders {layout.run.dir}/{layout.run.name}-*"
    raise LayoutError(f"there is nothing to resume: no complete checkpoint in {where}")


def _folders_of(layout: Layout) -> list[Path]:
    """The folders of all runs with the layout's run name, oldest first."""
    pattern = re.compile(re.escape(layout.run.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = [
        (match[1], int(match[2] or 1), path)
        for path in Path(layout.run.dir).glob(f"{layout.run.name}-*")
        if (match := pattern.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(found)]


def _checkpoint_in(
    folder: Path,
    skip: Callable[[str], None],
    newest: Callable[[list[Checkpoint]], Checkpoint | None],
    damage: Callable[[Path], str | None],
) -> Checkpoint:
    """The checkpoint for `--resume DIR`, where DIR is a checkpoint, a folder of checkpoints, or a run's folder."""
    if not folder.is_dir():
        raise LayoutError(f"there is nothing to resume: {folder} is not a folder")
    if found := newest(
        complete_checkpoints(folder, skip) or complete_checkpoints(folder / "checkpoints", skip)
    ):
        return found
    if not is_checkpoint_name(folder.name) and not (folder / MANIFEST).exists():
        raise LayoutError(f"there is nothing to resume: no complete checkpoint in {folder}")
    try:
        checkpoint = read(folder)
        if why := _invalid_knobs(checkpoint) or damage(folder):
            raise IncompleteError(why)
    except IncompleteError as why_not:
        raise LayoutError(f"there is nothing to resume: {why_not}") from None
    return checkpoint


def other_data(checkpoint: Checkpoint, layout: Layout, data: str) -> str | None:
    """An error message if this run's training text, which has the digest `data`, differs from the checkpoint's training
    text; else None. A different text is allowed if the layout's key data.digest contains the digest of this run's text,
    which is the value of `data`."""
    if checkpoint.manifest.data is None or data in (checkpoint.manifest.data, layout.data.digest):
        return None
    return (
        f"{checkpoint.folder} was trained on another text: its digest is {checkpoint.manifest.data}, but the digest of "
        f"data.source = {shown(layout.data.source)} on this machine is {data} (other files, or for stdlib another "
        f"release of Python); legal: the text of the checkpoint, or data.digest={data} to continue with this one"
    )


def _invalid_knobs(checkpoint: Checkpoint) -> str | None:
    """An error message if the checkpoint has a knob value that no layout can have, else None."""
    for knob, value in checkpoint.manifest.knobs.items():
        try:
            _with_unchecked(checkpoint.manifest.layout, {knob: value})
        except (KeyError, msgspec.ValidationError):
            return f"{checkpoint.folder} is damaged: no layout can have {shown(knob)} = {shown(value)}"
    return None


def _unfinished(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Return the checkpoint. Raises LayoutError if the checkpoint is already at or past the layout's last step."""
    if checkpoint.manifest.step >= layout.train.steps:
        raise LayoutError(
            f"{checkpoint.folder} is of step {checkpoint.manifest.step}, but train.steps = "
            f"{layout.train.steps} leaves nothing to train; legal: a larger train.steps"
        )
    return checkpoint


def _start_from(
    checkpoint: Checkpoint,
    layout: Layout,
    run_dir: Path | None,
    fixed: Collection[str],
    data: str | None,
    warn: Callable[[str], None],
    new: bool,
) -> Start:
    manifest = checkpoint.manifest
    saved, ours = _flat(manifest.layout), _flat(layout)
    for key in saved | ours:
        weights = manifest.weights_only
        must_match = key.startswith(_MUST_MATCH[:1] if weights else _MUST_MATCH)
        if must_match and not (weights and key in _OF_TRAINING) and saved.get(key) != ours.get(key):
            legal = "the model" if weights else "the model, tokenizer, seed and optimizer"
            raise LayoutError(
                f"{checkpoint.folder} has {key} = {spell(saved.get(key))}, the layout has {spell(ours.get(key))}; "
                f"legal: {legal} of the checkpoint"
            )
    if (
        layout.data.source == "shards"
        and not manifest.weights_only
        and saved["train.global_batch"] != ours["train.global_batch"]
    ):
        raise LayoutError(
            f"{checkpoint.folder} has train.global_batch = {saved['train.global_batch']}, the layout has "
            f"{ours['train.global_batch']}: the run would repeat or skip samples of data.shards; legal: "
            f"{saved['train.global_batch']}"
        )
    if data and manifest.data and data != manifest.data:
        if refusal := other_data(checkpoint, layout, data):
            raise LayoutError(refusal)
        warn(f"{checkpoint.folder} was trained on another text; the run continues with data.digest = {data}")
    # Keep the knob values that operators changed; all other knobs get the values in the layout. torchrun repeats the
    # command line at each restart. So in a continued run, a value on the command line replaces an operator's change
    # only if the run did not start with this value. In a new run, values on the command line always take precedence.
    changed = {}
    for knob, value in manifest.knobs.items():
        before, now = start_value(manifest.layout, knob), start_value(layout, knob)
        fixed_here = ".".join(layout_key(knob)) in fixed and (new or now != before)
        if value != before and not fixed_here:
            changed[knob] = value
    return Start(_with_legal_values(checkpoint, layout, changed, warn), run_dir, checkpoint)


def _with_legal_values(
    checkpoint: Checkpoint, layout: Layout, values: Mapping[str, Value], warn: Callable[[str], None]
) -> Layout:
    """Set knobs in a copy of `layout` to their values in `values`, and return the copy. For each value that is not
    legal in this layout, `warn` is called and the knob keeps the layout's value."""
    legal, rejected = layout, dict(values)
    with suppress(LayoutError):
        return with_knob_values(layout, rejected)
    why: dict[str, LayoutError] = {}
    for knob in [*rejected] * len(rejected):  # a value may become legal after another knob is set
        if knob in rejected:
            try:
                legal = with_knob_values(legal, {knob: rejected[knob]})
                del rejected[knob]
            except LayoutError as error:
                why[knob] = error
    for knob, value in rejected.items():
        key, ours = ".".join(layout_key(knob)), spell(start_value(layout, knob))
        warn(f"{checkpoint.folder} has {key} = {spell(value)}, the run continues with {ours}: {why[knob]}")
    return legal


def _flat(layout: Layout) -> dict[str, Any]:
    """The layout as a flat dict: dotted key -> value."""
    flat: dict[str, Any] = {}

    def add(prefix: str, tree: Any) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                add(f"{prefix}.{key}" if prefix else key, value)
        else:
            flat[prefix] = tree

    add("", msgspec.to_builtins(layout))
    return flat
