"""Details of one rank, in three lines."""

from collections.abc import Iterator

from agents.protocol import Vitals
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import LOST, Level
from cockpit.data.metrics import GiB, Metric, Readings, peers_word
from cockpit.data.ranks.rank_facts import no_record
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette


def inspector(
    store: Store, metric: Metric, readings: Readings, rank: int | None, width: int, colours: Palette
) -> list[StripLine]:
    """Three lines about a rank: its coordinates and process, its last step, and its current operation. An item that
    does not fit in `width` cells is left out entirely, because a truncated number would be misleading."""
    if rank is None or rank not in store.state.hellos:
        return [StripLine().add("arrow keys choose a rank", colours.faint)]
    hello, step, pulse = store.state.hellos[rank], store.state.steps.get(rank), store.state.pulses.get(rank)
    who = StripLine().add(f"r{rank} ", colours.cursor).add(f" {format.coords(hello.coords)}", colours.text)
    texts = [hello.host, hello.device, f"pid {hello.pid}"]
    who.add_fitting(width, *([(f" · {one}", colours.dim)] for one in texts if one))
    reading = readings[rank]
    numbers = StripLine()
    if reading.value is None:
        numbers.add(f"{format.MISSING} no {metric.title}", colours.faint)
    else:
        numbers.add(f"{format.fixed(reading.value, 5, metric.digits)} {metric.unit}", colours.strong)
        if len(store.state.hellos) > 1:
            against = f"{format.excess(reading.deviation)} vs. {peers_word(store)}"
            numbers.add(f" {against}", colours.text)
    if step:
        more = {name: format.fixed(spent, 5, 0).strip() for name, spent in step.phases.items()}
        if step.bubble_parts:
            more["idle"] = format.shares_text(step.bubble_parts)
        waits = f" · waits {step.waited_ms:.0f} of {step.step_ms:.0f} ms" if step.comm else ""
        items = [[(f" · {name} ", colours.dim), (text, colours.text)] for name, text in more.items()]
        numbers.add_fitting(width, [(waits, colours.text)], *items)
    gone = store.state.gone.get(rank)
    if gone:
        level = Level.NOTE if gone.clean else Level.BAD
        doing = StripLine().add(
            f"{level.value} {'done' if gone.clean else LOST[gone.process]}", colours.level[level]
        )
        doing.add(f" · {gone.text}" if gone.text else "", colours.dim)
    elif pulse:
        into, operation = format.operation_text(pulse.doing)
        doing = StripLine().add(into, colours.dim).add(operation, colours.text)
        if pulse.since_ms >= 1000:
            doing.add(f" for {format.age(pulse.since_ms / 1000)}", colours.dim)
    else:
        doing = StripLine().add(f"{format.MISSING} {no_record(store, 'pulse')}", colours.faint)
    vitals = store.state.vitals.get(rank)
    if vitals and not gone:
        if vitals.throttle:
            doing.add(
                f" · {Level.WARN.value} throttled by {', '.join(vitals.throttle)}", colours.level[Level.WARN]
            )
        doing.add_fitting(width, *([(f" · {text}", colours.dim)] for text in _vital_signs(vitals)))
    return [who, numbers, doing]


def _vital_signs(vitals: Vitals) -> Iterator[str]:
    """The available vital signs as short phrases, such as ``74 W``."""
    if vitals.device_percent is not None:
        yield f"device {vitals.device_percent:.0f} %"
    if vitals.device_memory_bytes is not None:
        total = f" of {vitals.device_memory_total / GiB:.0f}" if vitals.device_memory_total else ""
        yield f"{vitals.device_memory_bytes / GiB:.1f}{total} GiB"
    if vitals.power_w is not None:
        yield f"{vitals.power_w:.0f} W"
    if vitals.temperature_c is not None:
        yield f"{vitals.temperature_c:.0f} °C"
    if vitals.host_cpu_percent is not None:
        yield f"machine {vitals.host_cpu_percent:.0f} %"
