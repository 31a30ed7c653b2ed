"""One rank, in three lines."""

from cockpit import format
from cockpit.lines import Line
from cockpit.metrics import Metric, Reading
from cockpit.store import Store
from cockpit.theme import Palette
from cockpit.verdict import LOST, Level


def inspector(
    store: Store, metric: Metric, readings: dict[int, Reading], rank: int | None, colours: Palette
) -> list[Line]:
    """Who it is, its last step, what it is doing."""
    if rank is None or rank not in store.state.hellos:
        return [Line().add("arrows choose a rank", colours.faint)]
    hello, step, pulse = store.state.hellos[rank], store.state.steps.get(rank), store.state.pulses.get(rank)
    who = Line().add(f"r{rank} ", colours.cursor).add(f" {format.coords(hello.coords)}", colours.text)
    who.add(f" · {hello.host} · {hello.device} · pid {hello.pid}", colours.dim)
    reading = readings[rank]
    against = f"{reading.apart:+.0%} against its stage".replace("-0%", "+0%")
    numbers = Line().add(f"{format.fixed(reading.value, 5, metric.digits)} {metric.unit}", colours.strong)
    numbers.add(f" {against}", colours.text)
    if step:
        for name, spent in step.phases.items():
            numbers.add(f" · {name} ", colours.dim).add(format.fixed(spent, 5, 0).strip(), colours.text)
        if step.bubble_parts:
            numbers.add(" · idle ", colours.dim).add(format.parts(step.bubble_parts), colours.text)
    gone = store.state.gone.get(rank)
    if gone:
        level = Level.NOTE if gone.clean else Level.BAD
        doing = Line().add(
            f"{level.value} {'done' if gone.clean else LOST[gone.process]}", colours.level[level]
        )
        doing.add(f" {gone.text}", colours.dim)
    elif pulse:
        doing = Line().add("in ", colours.dim).add(pulse.doing or format.MISSING, colours.text)
        if pulse.since_ms >= 1000:
            doing.add(f" for {format.age(pulse.since_ms / 1000)}", colours.dim)
    else:
        doing = Line().add(f"{format.MISSING} no pulse yet", colours.faint)
    return [who, numbers, doing]
