"""The phases of a step in one row per rank, for runs without a pipeline and for steps without a timeline."""

import math

from rich.cells import cell_len
from rich.style import Style

from agents.alerts.finding import peer_baseline
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.history.metric_table import PHASE
from cockpit.data.history.rank_values import OWN, STEP, ByRank
from cockpit.data.pipeline.step_comparison import by_rank_at, name_of, phases_at
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.pipeline.verdict import verdict_lines, wrapped

NUMBERS = 18
NARROW = 60
REST = "─"
SLOWER = 0.1


class PhaseBars:
    """Draws one stacked bar per rank, with one segment per phase. The lengths of the segments are proportional to
    time."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._rows: list[int] = []  # the ranks of the visible rows

    def natural_height(self, store: Store, step: int | None) -> int:
        values = by_rank_at(store, step)
        return min(len(values.ranks), 24) + 7 if values else 3

    def move(self, by: int) -> None:
        """Select the rank of the next or previous row."""
        if self._rows:
            here = self._rows.index(self.selection.rank) if self.selection.rank in self._rows else -by
            self.selection.rank = self._rows[max(0, min(here + by, len(self._rows) - 1))]

    def draw(
        self, store: Store, step: int | None, why: str, width: int, height: int, colours: Palette
    ) -> list[StripLine]:
        values = by_rank_at(store, step)
        head = [StripLine().add(f"{format.MISSING} {why}", colours.dim)] if why else []
        if values is None:
            return [*head, *self._without(store, step, width, colours)]
        key = OWN if OWN in values.values else STEP
        order = [
            at
            for at in sorted(range(len(values.ranks)), key=lambda at: -_known(values.values[key][at]))
            if not math.isnan(values.values[key][at])
        ]
        room = max(1, height - len(head) - 6)
        folded = len(order) > room
        shown = order[:room] if folded else sorted(order, key=lambda at: values.ranks[at])
        self._rows = [values.ranks[at] for at in shown]
        names = [name for name in values.values if name.startswith(PHASE)]
        left = max((len(f"r{rank}") for rank in self._rows), default=1) + 1
        numbers = NUMBERS if width >= NARROW else 0
        whole = max((_whole(values, names, at) for at in order), default=0.0)
        track = max(1, width - left - numbers)
        styles = phase_styles(names, colours)
        lines = [*head, self._names(names, styles, left, colours)]
        if numbers:
            lines[-1].pad_to(width - numbers, colours.dim).add(f"{key:>9} uneven", colours.dim)
        usual = _usual(values, key)
        for at in shown:
            lines.append(self._bar(values, at, names, styles, whole, left, track, colours))
            if numbers:
                _number(lines[-1], values.values[key][at], usual[values.ranks[at]], colours)
        if folded:
            rest = [values.values[key][at] for at in order[room:]]
            text = f"{len(rest)} more rank{'s' * (len(rest) != 1)}: {key} {min(rest):.0f}–{max(rest):.0f} ms"
            lines.append(StripLine().add(f"{'':{left}}{text} · shown: the longest", colours.dim))
        elif len(lines) + 3 <= height:
            lines.append(StripLine())
        lines += wrapped("▸", self._selected(store, values, names), width, colours.accent, colours)
        return [*lines, *verdict_lines(store, step, width, colours)]

    def _without(self, store: Store, step: int | None, width: int, colours: Palette) -> list[StripLine]:
        """The lines for a step whose per-rank values are not kept."""
        if step is None:
            return [StripLine().add(f"{format.MISSING} no step is done yet", colours.faint)]
        name = f"step {format.grouped(step)}"
        if phases_at(store, step) is None:
            return [StripLine().add(f"{format.MISSING} {name} is not kept", colours.dim)]
        text = f"{format.MISSING} of {name}, only medians by stage are kept, not individual ranks"
        return [StripLine().add(text, colours.dim), *verdict_lines(store, step, width, colours)]

    def _names(self, names: list[str], styles: dict[str, Style], left: int, colours: Palette) -> StripLine:
        line = StripLine().pad_to(left, colours.dim)
        for name in names:
            line.add(f" {name_of(name)} ", styles[name]).add(" ", colours.dim)
        return line.add(f"{REST} not in a phase", colours.dim)

    def _bar(
        self,
        values: ByRank,
        at: int,
        names: list[str],
        styles: dict[str, Style],
        whole: float,
        left: int,
        track: int,
        colours: Palette,
    ) -> StripLine:
        rank = values.ranks[at]
        label = colours.cursor if rank == self.selection.rank else colours.text
        line = StripLine().add(f"r{rank}", label).pad_to(left, colours.dim)
        begin, end_ms = 0, 0.0
        for name in names:
            ms = values.values[name][at]
            if math.isnan(ms) or not whole:
                continue
            end_ms += ms
            end = min(track, round(end_ms / whole * track))
            cells = end - begin
            if cells > 0:
                line.add(bar_label(f"{name_of(name)} {ms:.0f}", f"{ms:.0f}", cells), styles[name])
            begin = max(begin, end)
        total = values.values[STEP][at]
        end = min(track, round(max(end_ms, total) / whole * track)) if whole else begin
        line.add(REST * (end - begin), colours.faint)
        return line.pad_to(left + track, colours.faint)

    def _selected(self, store: Store, values: ByRank, names: list[str]) -> str:
        """The phases of the selected rank, compared with the median over ranks or, if there are only two ranks, with
        the other rank."""
        rank = self.selection.rank
        if rank is None:
            return f"{format.MISSING} no rank is selected"
        own = values.of(rank)
        if not own:
            return f"{store.name(rank)} has no record of this step"
        against = {name: _usual(values, name)[rank] for name in [OWN, *names] if name in own}
        parts = [store.name(rank)]
        parts += [
            f"{name_of(name)} {own[name]:.0f} ms ({format.excess(own[name] / usual - 1)})"
            for name, usual in against.items()
            if usual
        ]
        return " · ".join(parts) + f" against the {'other' if len(values.ranks) == 2 else 'median'} rank"


def bar_label(text: str, short: str, cells: int) -> str:
    """One segment of a bar, `cells` cells wide. Its label is `text`, or `short` if `text` does not fit, or empty if
    neither fits."""
    label = next((one for one in (text, short, "") if cell_len(one) < cells), "")
    return f"▏{label}{' ' * (cells - 1 - cell_len(label))}" if cells > 0 else ""


def phase_styles(names: list[str], colours: Palette) -> dict[str, Style]:
    """The style of each phase. Forward and backward have the same styles as in the pipeline timeline; the other phases
    use the remaining styles in turn."""
    fixed = {PHASE + "forward": colours.forward[0], PHASE + "backward": colours.backward[0]}
    rest = [colours.weight[0], colours.forward[1], colours.backward[1], colours.weight[1]]
    others = [name for name in names if name not in fixed]
    return fixed | {name: rest[number % len(rest)] for number, name in enumerate(others)}


def _number(line: StripLine, value: float, middle: float, colours: Palette) -> None:
    over = value / middle - 1 if middle else 0.0
    style = colours.level[Level.WARN] if over > SLOWER else colours.text
    line.add(format.duration_ms(value).rjust(10), style)
    line.add(format.excess(over).rjust(7) + ("!" if over > SLOWER else " "), style)


def _usual(values: ByRank, name: str) -> dict[int, float]:
    """The baseline (see `peer_baseline`) for the phase or step time `name`, for each rank with a known value."""
    found = zip(values.ranks, values.values[name], strict=True)
    return peer_baseline({rank: value for rank, value in found if not math.isnan(value)})


def _known(value: float) -> float:
    return -1.0 if math.isnan(value) else value


def _whole(values: ByRank, names: list[str], at: int) -> float:
    """The length of a rank's bar in ms: the time of its step, or the sum of its phases if that is longer."""
    phases = sum(ms for name in names if not math.isnan(ms := values.values[name][at]))
    return max(phases, _known(values.values[STEP][at]))
