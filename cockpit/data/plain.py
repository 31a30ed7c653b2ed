"""The state of a run as plain data for ``--json``. A missing value is null, never zero."""

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from agents.alerts.finding import by_severity
from agents.protocol import SAMPLE, CommandState, Step, Update
from cockpit.data.diagnosis.diagnosis import diagnosis
from cockpit.data.diagnosis.status import status_word
from cockpit.data.filter import Filter, matches, matching
from cockpit.data.log.run_log import Kind, log_entries
from cockpit.data.store import Store
from cockpit.data.traffic.traffic import balance, sampled_rows


def plain(value: Any) -> Any:
    """A message as nested dictionaries keyed by field name (on the wire, a message is an array)."""
    if isinstance(value, Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def to_json(record: Any) -> str:
    """One line of JSON. NaN becomes null, and unprintable characters are escaped."""
    text = msgspec.json.encode(record).decode()
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(letter: str) -> str:
    """The JSON escape of a character that msgspec does not escape, such as a C1 control or a bidi mark."""
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def update(message: Update) -> dict[str, Any]:
    """An update from the hub as a dictionary: the name of its type under the key "kind", and its fields."""
    return {"kind": type(message).__name__.lower(), **plain(message)}


def marked(record: dict[str, Any], store: Store) -> dict[str, Any]:
    """`record` with the added field `simulated` if the run is a simulation; otherwise `record` itself."""
    return {**record, "simulated": True} if store.simulated else record


def answer(record: dict[str, Any], store: Store) -> dict[str, Any]:
    """`record`, the answer to a command, with the name of the run that gave it."""
    return {"run": store.run_name, **marked(record, store)}


def knobs(store: Store) -> dict[str, Any]:
    """The knobs with their values, the revision (number of the newest applied change), and a digest of the values."""
    board = store.state.board
    return {
        "revision": board.revision if board else None,
        "digest": board.digest if board else None,
        "knobs": plain(board.knobs) if board else [],
    }


def ranks(store: Store, among: Collection[int] | None = None) -> list[dict[str, Any]]:
    """The newest records of each rank, or only of the ranks in `among`."""
    state = store.state
    return [
        {
            "rank": rank,
            "coords": hello.coords,
            "host": hello.host,
            "pid": hello.pid,
            "device": hello.device,
            "leader": hello.leader,
            "gone": plain(state.gone.get(rank)),
            "step": plain(state.steps.get(rank)),
            "own_ms": _own_ms(state.steps.get(rank)),
            "peers": plain(state.peers.get(rank)),
            "pulse": plain(state.pulses.get(rank)),
            "vitals": plain(state.vitals.get(rank)),
        }
        for rank, hello in sorted(state.hellos.items())
        if among is None or rank in among
    ]


def all_to_all(store: Store) -> dict[str, Any] | None:
    """Totals and extremes of the newest sampled all-to-all; the bytes to each destination are in each rank's
    `peers`."""
    matrix = store.traffic.shown
    found = balance(matrix) if matrix else None
    if matrix is None or found is None:
        return None
    return {
        "step": matrix.step,
        "rows": sampled_rows(store, matrix),
        "bytes": found.total,
        "between_nodes": found.between_nodes,
        "hottest": found.hottest._asdict(),
        "sends_most": found.sender._asdict(),
        "receives_most": found.receiver._asdict(),
    }


def _own_ms(step: Step | None) -> float | None:
    """A rank's own time in a step (the step time without the waiting for other ranks); None if no traffic was measured,
    because the waiting time is then unknown."""
    return step.own_ms if step and step.comm else None


def overview(store: Store) -> dict[str, Any]:
    """The state of the run as a whole: its state word, diagnosis and newest step."""
    word, _ = status_word(store)
    found = diagnosis(store)
    hello = next(iter(store.state.hellos.values()), None)
    return {
        "run": hello.run if hello else None,
        "simulated": store.simulated,
        "age_s": store.age_s,
        "link": store.link.name.lower(),
        "state": word,
        "diagnosis": {
            "level": found.level.name.lower(),
            "text": found.sentence,
            "rank": found.rank,
            "cause": found.cause or None,
            "since": found.since,
        },
        "step": store.step,
        "world": store.world,
        "coverage": {"reporting": len(store.reporting) if store.rank_records else None, "world": store.world},
        "summary": plain(store.summary),
        "validation": validation(store),
    }


def snapshot(store: Store, epoch: str, seq: int, chosen: Filter | None = None) -> dict[str, Any]:
    """The whole state, with the values that a screen shows; with a filter, only the ranks that match are included."""
    hello = next(iter(store.state.hellos.values()), None)
    return {
        **overview(store),
        "epoch": epoch,
        "seq": seq,
        "facts": hello.facts if hello else {},
        "revision": store.state.board.revision if store.state.board else None,
        "knobs": knobs(store)["knobs"],
        "experts": plain(store.state.experts),
        "loads": plain(store.state.loads),
        "all_to_all": all_to_all(store),
        "alerts": alerts(store),
        "ranks": ranks(store, matching(store, chosen)),
        **({"filter": filtered(store, chosen)} if chosen else {}),
    }


def alerts(store: Store) -> list[dict[str, Any]]:
    """The active alerts, worst first."""
    return [plain(alert) for alert in by_severity(store.state.alerts.values())]


def validation(store: Store) -> dict[str, Any] | None:
    """The newest validation loss, and its step; None if there is none."""
    found = store.state.newest("validation_loss")
    return {"step": found[0], "loss": found[1]} if found else None


def filtered(store: Store, chosen: Filter) -> dict[str, Any]:
    """The text of a filter, the number of ranks that match it, and the number of ranks that lack a value that the
    filter needs."""
    found = matches(store, chosen)
    return {"text": chosen.text, "matching": len(found.ranks), "without_data": found.unknown}


REFUSALS = ("rejected", "expired", "rolled_back")


def outcome(command: CommandState) -> dict[str, Any]:
    """The outcome of a proposal as plain data, for the script that sent the proposal."""
    if command.state in REFUSALS:
        return {"state": command.state, "why": command.why, "id": command.id}
    return {
        "state": command.state,
        "revision": command.revision,
        "applied_step": command.applied_step,
        "acks": command.acks,
        "world": command.world,
        "id": command.id,
        "before": command.before,
        **({"waits" if command.state == "accepted" else "why": command.why} if command.why else {}),
    }


def log(store: Store) -> Iterable[dict[str, Any]]:
    """The entries of the run's log, each with the knob change, action or trial that it reports, if any. A generated
    sample keeps its newlines, and its metadata are in the field `sample`."""
    for entry in log_entries(store):
        about = {"command": plain(entry.command)} if entry.command else {}
        about |= {"trial": plain(entry.trial)} if entry.trial else {}
        text = entry.text
        if entry.kind is Kind.SAMPLE:
            text = "\n".join(entry.lines)
            about["sample"] = {name: value for name, value in entry.facts.items() if name != SAMPLE}
        yield plain_entry(entry.time_s, entry.level, entry.source, text) | about


def plain_entry(time_s: float | None, level: str, source: str, text: str) -> dict[str, Any]:
    """The fields that every log entry has, as plain data; an entry about a command or a trial has more."""
    return {"time_s": time_s, "level": level, "source": source, "text": text}
