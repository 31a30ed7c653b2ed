"""The settings of a run and the paths of its files, as the info screen and `cockpit info` show them."""

import platform
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.protocol import VERSION, CommandState, Hello, KnobState, Value, spell
from agents.rundir.local_machine import this_host
from cockpit.data import format
from cockpit.data.diagnosis.status import SIMULATED
from cockpit.data.run_folders.final_summary import (
    began_s,
    duration_text,
    final_summary,
    has_ended,
    outcome_rows,
)
from cockpit.data.run_folders.run_files import NAMES, RunFiles
from cockpit.data.run_folders.run_list import bytes_text
from cockpit.data.store import Store

MOST_NAMED = 6  # maximum number of hosts or devices that are listed by name


@dataclass(frozen=True)
class Fact:
    """One line of the info screen: a label, its text, and the value for JSON. If `value` is None, the JSON value is the
    text."""

    label: str
    text: str
    value: Any = None

    @property
    def plain(self) -> Any:
        """The value for JSON; None if the value is unknown."""
        if self.text == format.MISSING:
            return None
        return self.text if self.value is None else self.value


@dataclass(frozen=True)
class Section:
    """Lines of the info screen under one heading."""

    title: str
    facts: tuple[Fact, ...]


def run_info(store: Store, files: RunFiles | None, target: str) -> list[Section]:
    """The settings and file paths of the run in `store`, as far as its ranks report them or its folder contains them.
    `files`: the files in the run's folder; None if the folder is not on this machine. `target`: the name of the run for
    `cockpit attach`.
    """
    found = [Section(title, tuple(facts(store, files, target))) for title, facts in SECTIONS.items()]
    return [section for section in found if section.facts]


def plain_info(sections: list[Section]) -> dict[str, Any]:
    """The JSON object that ``--json`` prints: it maps each section's title to an object with the section's values by
    label."""
    record: dict[str, Any] = {}
    for section in sections:
        values = record.setdefault(section.title.replace(" ", "_"), {})
        for fact in section.facts:
            key = fact.label.replace(" ", "_")
            if key in values:
                known = values[key] if isinstance(values[key], list) else [values[key]]
                values[key] = [*known, fact.plain]
            else:
                values[key] = fact.plain
    return record


# ------------------------------------------------------------------------------------------------- sections


def _run(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    leader = _leader(store)
    yield Fact("run", f"{SIMULATED} {store.run}" if store.simulated else store.run)
    yield Fact("id", format.clean(files.folder.name) if files else _text(leader.run if leader else None))
    yield Fact("state", store.link.name.lower())
    yield Fact("simulated", "yes, nothing trains" if store.simulated else "no", store.simulated)
    yield _began(store, leader, files)
    user = store.fact("user")
    host = store.fact("simulated_on") or (leader.host if leader else None)
    yield Fact("started by", f"{_text(user)} on {_text(host)}" if user else format.MISSING)
    yield Fact("command", _text(store.fact("command")))


def _began(store: Store, leader: Hello | None, files: RunFiles | None) -> Fact:
    at_s = began_s(leader) or (files.hub.started_s if files and files.hub else 0.0)
    if not at_s:
        return Fact("began", format.MISSING)
    newest = store.summary
    lasted = newest.time_s - at_s if newest else 0.0
    since = f", {duration_text(lasted)} to the newest step" if lasted > 0 else ""
    return Fact("began", f"{_date(at_s)}{since}", at_s)


def _outcome(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    if has_ended(store):
        yield from (Fact(label, text) for label, text in outcome_rows(final_summary(store)))


def _files(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    if files is None:
        folder = store.fact("folder")
        leader = _leader(store)
        where = f"{_text(folder)} on {_text(leader.host if leader else None)}" if folder else format.MISSING
        yield Fact("folder", where, folder)
        yield Fact("checkpoints", _text(store.fact("checkpoints")))
        yield Fact("files", "the folder is not on this machine" if folder else format.MISSING)
        return
    yield Fact("folder", format.clean(str(files.folder.absolute())))
    for word, name in NAMES.items():
        path = files.folder.absolute() / name
        if word == "checkpoints" and isinstance(elsewhere := store.fact("checkpoints"), str):
            path = Path(elsewhere)
        if word in files.sizes:
            size = files.sizes[word]
            about = "" if size is None else f" · {bytes_text(size)}"
            yield Fact(word, f"{format.clean(str(path))}{about}", str(path))
        elif word == "checkpoints" and path.parent != files.folder.absolute():
            yield Fact(word, format.clean(str(path)))
        elif word not in ("failure", "scenario"):
            yield Fact(word, format.MISSING)


def _connection(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    hub = files.hub if files else None
    if files and has_ended(store):
        yield Fact("replay", f"cockpit replay {_quoted(str(files.folder.absolute()))}")
    elif files:
        attach = f"cockpit attach {_quoted(str(files.folder.absolute()))}"
        yield Fact("attach", attach)
        yield Fact("attach by ssh", f"ssh -t {_quoted(_host(hub))} {attach}")
    else:
        yield Fact("attach", f"cockpit attach {_quoted(target)}")
    if files and files.hub_problem:
        yield Fact("hub", format.clean(files.hub_problem))
    if hub:
        alive = "alive" if hub.live else "not alive"
        state = f"process {hub.pid} on {_text(hub.host)}, {alive}" if hub.here else f"on {_text(hub.host)}"
        yield Fact("hub", state)
        yield Fact("clients", format.clean(hub.endpoints.clients))
        yield Fact("ranks", format.clean(hub.endpoints.ranks))
        yield Fact("tcp", format.clean(hub.tcp.clients) if hub.tcp else "not listening")


def _model(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    size, active = store.number("params"), store.number("active_params")
    uses = f", {format.si(active)} active" if active and active != size else ""
    yield Fact("parameters", f"{format.si(size)}{uses}", size)
    yield from (_fact(store, name) for name in ("layers", "d_model", "seq_len", "precision"))
    experts, top_k = store.number("experts"), store.number("top_k")
    if experts:
        yield Fact("experts", f"{experts}, top {top_k or format.MISSING}", experts)
    elif experts == 0:
        yield Fact("experts", "none: dense", 0)


def _grid(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    hellos = store.state.hellos.values()
    sizes: dict[str, int] = {}
    for hello in hellos:
        for axis, at in hello.coords.items():
            sizes[axis] = max(sizes.get(axis, 0), at + 1)
    shape = " x ".join(f"{format.clean(axis)} {size}" for axis, size in sizes.items())
    yield Fact("ranks", format.grouped(store.world), store.world)
    yield Fact("grid", shape or format.MISSING, sizes)
    yield _fact(store, "schedule")
    yield _fact(store, "zero", "ZeRO stage")
    yield Fact("hosts", _counted(Counter(hello.host for hello in hellos)))
    yield Fact("devices", _counted(Counter(_device(hello.device) for hello in hellos)))
    if store.number("cores") is not None:
        yield _fact(store, "cores", "cores a host")


def _training(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    yield _fact(store, "steps")
    yield _fact(store, "global_batch", "sequences a step")
    yield _fact(store, "optimizer")
    yield Fact("learning rate", learning_rate_text(store), store.fact("lr"))
    yield _fact(store, "data")
    every = store.number("checkpoint_every")
    if every is not None and not store.simulated:
        text = f"every {format.grouped(every)} steps, and at the end" if every else "only on request"
        yield Fact("checkpoints", text, every)


AFTER_WARMUP = {
    "constant": "constant",
    "linear": "a linear decay",
    "cosine": "a cosine decay",
    "wsd": "constant, then a linear decay",
}


def learning_rate_text(store: Store) -> str:
    """The learning rate as text, such as
    ``0.001 after a linear warm-up of 20 steps, then constant · now 0.0005 (lr_scale 0.5)``.
    """
    rate, warmup = store.fact("lr"), store.number("warmup")
    schedule = str(store.fact("lr_schedule") or "constant")
    then = AFTER_WARMUP.get(schedule, format.MISSING)
    if schedule in AFTER_WARMUP and schedule != "constant":
        then += _end_of_decay(store)
    if not isinstance(rate, int | float):
        text = format.MISSING
    elif warmup:
        text = f"{rate:g} after a linear warm-up of {format.grouped(warmup)} steps, then {then}"
    else:
        text = f"{rate:g}, {then}" if warmup == 0 else f"{rate:g}"
    newest = store.summary
    if newest is None or newest.lr is None:
        return text
    scale = newest.knobs.get("lr_scale")
    scaled = f" (lr_scale {format.knob(scale)})" if scale not in (None, 1) else ""
    now = f"now {newest.lr:g}{scaled}"
    return now if text == format.MISSING else f"{text} · {now}"


def _end_of_decay(store: Store) -> str:
    """Text that says over which steps, and to which value, the learning rate decays, such as `` over the last 30 steps
    to 0.0001``; values that the run does not report are omitted."""
    rate, end, decay = store.fact("lr"), store.fact("lr_end"), store.number("decay")
    over = f" over the last {format.grouped(decay)} steps" if decay else ""
    if isinstance(rate, int | float) and isinstance(end, int | float):
        return f"{over} to {rate * end:g}"
    return over


def _overrides(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    """Facts about each knob whose value differs from its value at the start of the run: both values, and who last
    changed the knob."""
    board = store.state.board
    if board is None:
        return
    layout = files.layout if files else {}
    changed = [
        fact
        for knob in board.knobs
        if not knob.action and (fact := _override(store, knob, layout)) is not None
    ]
    yield from changed or [Fact("knobs", "none: every knob has the value of the layout")]


def _override(store: Store, knob: KnobState, layout: dict[str, str]) -> Fact | None:
    applied = [
        one for one in store.state.commands.values() if one.state == "applied" and knob.name in one.changes
    ]
    applied.sort(key=lambda command: command.revision)
    given: str | None = layout.get(f"knobs.{knob.name}")
    if given is None and applied and knob.name in applied[0].before:
        given = format.knob(applied[0].before[knob.name])
    now = format.knob(knob.value)
    if given is None or given == now:
        return None
    return Fact(format.clean(knob.name), f"{given} → {now}{_last_change(applied)}", knob.value)


def _last_change(applied: list[CommandState]) -> str:
    if not applied:
        return ""
    newest = applied[-1]
    step = f" since step {format.grouped(newest.applied_step)}" if newest.applied_step is not None else ""
    return f"{step} by {format.clean(newest.who)}" if newest.who else step


def _versions(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    release = store.fact("release")
    yield Fact("run", f"train-cockpit {_text(release)}" if release else format.MISSING, release)
    yield Fact("torch of the run", _text(store.fact("torch")))
    yield Fact("python of the run", _text(store.fact("python")))
    yield Fact("this cockpit", f"train-cockpit {_version('train-cockpit')} on {this_host()}")
    yield Fact("textual", _version("textual"))
    yield Fact("python", platform.python_version())
    yield Fact("wire", str(VERSION), VERSION)


def _layout(store: Store, files: RunFiles | None, target: str) -> Iterator[Fact]:
    leader = _leader(store)
    yield Fact("digest", _text(leader.layout if leader else None))
    if files and files.layout:
        yield from (Fact(key, value) for key, value in files.layout.items())
    elif files:
        yield Fact("file", "it cannot be read" if "layout" in files.sizes else "the folder has none")
    else:
        yield Fact("file", "it is in the run's folder, which is not on this machine")


SECTIONS: dict[str, Callable[[Store, RunFiles | None, str], Iterator[Fact]]] = {
    "run": _run,
    "outcome": _outcome,
    "connection": _connection,
    "files": _files,
    "overrides in force": _overrides,
    "training": _training,
    "model": _model,
    "grid": _grid,
    "versions": _versions,
    "layout as given": _layout,
}
"""The sections by their title, in the order of the screen."""


# -------------------------------------------------------------------------------------------------- helpers


def _leader(store: Store) -> Hello | None:
    hellos = store.state.hellos.values()
    return next((hello for hello in hellos if hello.leader), next(iter(hellos), None))


def _text(value: Value) -> str:
    return format.MISSING if value in (None, "") else format.clean(spell(value))


def _fact(store: Store, name: str, label: str = "") -> Fact:
    value = store.fact(name)
    shown = format.grouped(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)
    return Fact(label or name, shown, value)


def _counted(names: Counter[str]) -> str:
    """Names with the number of times that each occurs, as text such as ``node0 (8), node1 (8)``. Only the `MOST_NAMED`
    most frequent names are listed, followed by the number of other names."""
    if not names:
        return format.MISSING
    shown = [f"{format.clean(name) or 'unnamed'} ({count})" for name, count in names.most_common(MOST_NAMED)]
    more = f" and {format.grouped(len(names) - MOST_NAMED)} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(shown)}{more}"


def _device(device: str) -> str:
    """A device without its index, such as ``cuda H100`` for ``cuda:3 H100``."""
    kind, colon, rest = device.partition(":")
    return f"{kind} {rest.lstrip('0123456789').strip()}".strip() if colon else device


def _host(hub: Any) -> str:
    return hub.host if hub and hub.host else this_host()


def _quoted(text: str) -> str:
    return shlex.quote(format.clean(text))


def _date(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return format.MISSING


def _version(package: str) -> str:
    from importlib import metadata  # a slow import that only this function needs

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return format.MISSING
