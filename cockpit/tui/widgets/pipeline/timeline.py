"""Panel with the timeline of one step. The timeline has one row per stage, with the stage's actions, or one row per
rank, with the rank's phases."""

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.pipeline.pipelines import (
    UNEVEN,
    Lane,
    Pipeline,
    at,
    excess,
    moment_text,
    pipelines,
    replica_of,
    stage_count,
)
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import STEPS, TIMELINE, TIMELINE_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.overview import micro_batches_text
from cockpit.tui.widgets.pipeline.phase_bars import PhaseBars
from cockpit.tui.widgets.pipeline.tracks import Window, lane_cells, legend, missing, ruler, stops
from cockpit.tui.widgets.pipeline.verdict import comparison_lines, verdict_lines, wrapped

NUMBERS = 22  # cells of the numbers right of a track
NARROW = 64  # below this width, a track has no numbers
FOOT = 4  # lines under the rows: legend, cursor, and two lines that compare the step with the usual one
SHORTEST_MS = 0.05  # the shortest window that zooming shows


def shown_step(store: Store, selection: Selection) -> int | None:
    """The step that the screen shows: the selected step; otherwise the newest step that has a timeline; otherwise the
    newest step that all ranks have reported."""
    if selection.step is not None:
        return selection.step
    if stage_count(store) > 1 and store.timelines.steps:
        return store.timelines.steps[-1]
    return store.phases.steps[-1] if store.phases.steps else store.step


@dataclass
class _Layout:
    """Where the rows were last drawn. Key presses and mouse clicks are mapped to rows with these positions."""

    pipeline: Pipeline
    window: Window
    left: int  # width of the labels
    first: int  # first visible row
    top: int  # line of the first visible row
    visible: int


class TimelinePanel(Panel):
    """The panel with the actions of one pipeline in one step."""

    TOPICS = frozenset({Topic.PIPELINE, Topic.RANKS, Topic.GRID})
    TITLE = "Pipeline"
    OPENS = "ranks"
    NATURAL = True
    EVERY = 2
    BINDINGS: ClassVar[list[Binding]] = TIMELINE_KEYS  # type: ignore[assignment]
    ACTIONS = (*TIMELINE, *STEPS)
    HELP = (
        "Each row is a rank of a pipeline (`v`: a stage), and time runs to the right. `F` is forward and `B` backward, "
        "numbered by micro-batch. If a `W` for the weight gradients follows, `B` computes only the input gradients. If "
        "a rank has several stages, letters and shades distinguish them. `─` is idle time. In a cell with several "
        "blocks, a lower-case letter names the kind that fills most of the cell. Busy is the time in actions in this "
        "step; `!` marks a row that is busy more than 10 % longer than the median row. If several replicas send "
        "timelines, the panel shows the one of the selected rank (`d`: the next replica, the longest window first). If "
        "only one replica sends timelines, as in most runs, the border says so. Without a pipeline, the rows are ranks "
        "with their phases. The last line compares the step with the usual step, which is the median of steps with the "
        "same knobs."
    )

    def __init__(self, id: str, selection: Selection, other: bool = False) -> None:
        """`other`: show the slowest kept step, for comparison with the main timeline panel of the screen. If the main
        panel already shows the slowest step, show the newest step."""
        super().__init__(id)
        self.selection = selection
        self.other = other
        self.replica: str | None = None  # its label; None: the one with the longest window
        self._replica_rank = selection.rank  # the selected rank whose replica was last looked up
        self.by_stage = False
        self.cursor_row = 0
        self.cursor_ms = 0.0
        self.start_ms = 0.0
        self.length_ms: float | None = None  # None: the whole window
        self.bars = PhaseBars(selection)
        self._layout: _Layout | None = None
        self._followed_rank: int | None = None  # the selected rank to which the cursor has moved
        self._rows_of: tuple[object, ...] = ()  # the data from which `_rows` are drawn
        self._rows: dict[tuple[object, ...], StripLine] = {}

    def _step(self, store: Store) -> int | None:
        shown = shown_step(store, self.selection)
        if not self.other:
            return shown
        slowest = store.phases.slowest()
        return slowest if slowest != shown else shown_step(store, Selection())

    def choice(self) -> object:
        return (
            self.selection.step,
            self.selection.rank,
            self.replica,
            self.by_stage,
            self.cursor_row,
            self.cursor_ms,
            self.start_ms,
            self.length_ms,
            self._alone,
        )

    # ----------------------------------------------------------------------------------------- titles

    def title(self, store: Store) -> str:
        knobs = {knob.name: knob.value for knob in store.state.board.knobs} if store.state.board else {}
        piped = stage_count(store) > 1
        parts = ["Pipeline" if piped else "Phases"]
        schedule = (knobs.get("schedule") or store.fact("schedule")) if piped else None
        if schedule:
            parts.append(format.clean(str(schedule)))
        if (
            piped
            and knobs.get("micro_batches") is not None
            and self.selection.step is None
            and not self.other
        ):
            parts.append(micro_batches_text(knobs["micro_batches"]))
        step = self._step(store)
        if step is not None:
            slowest = "slowest kept: " if step == store.phases.slowest() else ""
            follows = "newest: " if self.selection.step is None and not self.other else slowest
            parts.append(f"{follows}step {format.grouped(step)}")
        return " · ".join(parts)

    def subtitle(self, store: Store) -> str:
        found = pipelines(store, self._step(store))
        if not found or stage_count(store) < 2:
            return ""
        which = self._which(store, found)
        own = replica_of(store, self.selection.rank)
        elsewhere = own is not None and all(one.label != own for one in found)
        other = f" · r{self.selection.rank} is in {own}, which sends no timeline" if elsewhere else ""
        if len(found) == 1:
            label = found[0].label or "the only replica"
            return f"{label}{other}" if other else f"{label}: no other replica sends timelines"
        place = f"number {which + 1}" if which else "the longest"
        return f"{found[which].label} · {place} of {len(found)} replicas{other}"

    def _which(self, store: Store, found: list[Pipeline]) -> int:
        """The index in `found` of the replica to show. When the user selects a rank, its replica is shown."""
        labels = [one.label for one in found]
        rank = self.selection.rank
        if rank != self._replica_rank:
            self._replica_rank = rank
            if (own := replica_of(store, rank)) in labels:
                self.replica = own
        return labels.index(self.replica) if self.replica in labels else 0

    def natural_height(self, store: Store) -> int:
        pipeline = self._pipeline(store)
        if pipeline is None:
            return self.bars.natural_height(store, self._step(store))
        return len(pipeline.lanes) + 1 + FOOT

    # ---------------------------------------------------------------------------------------- drawing

    def _pipeline(self, store: Store) -> Pipeline | None:
        found = pipelines(store, self._step(store)) if stage_count(store) > 1 else []
        if not found:
            return None
        chosen = found[self._which(store, found)]
        if not (self.by_stage and chosen.several):
            return chosen
        also = (chosen.step, chosen.label, store.timelines.revision)
        return store.once(("by stage", self.other), (Topic.GRID,), chosen.by_stage, also)

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        pipeline = self._pipeline(store)
        step = self._step(store)
        self._layout = None
        if pipeline is None:
            lines = self.bars.draw(store, step, self._why(store, step), width, height, colours)
            if step is not None and self._alone and height - len(lines) > 2:
                lines += [
                    StripLine(),
                    *comparison_lines(store, step, width, height - len(lines) - 1, colours),
                ]
            return lines
        lanes = pipeline.lanes
        self._follow_rank(store, lanes)
        self.cursor_row = max(0, min(self.cursor_row, len(lanes) - 1))
        left = max(len(lane.label) for lane in lanes) + 1
        numbers = NUMBERS if width >= NARROW else 0
        cursor = moment_text(pipeline, lanes[self.cursor_row], self.cursor_ms)
        foot = [
            *wrapped("▸", cursor, width, colours.accent, colours),
            *verdict_lines(store, step, width, colours),
        ]
        foot = foot[: max(0, height - 1 - min(len(lanes), height // 2))]
        room = max(1, height - 1 - len(foot))
        keyed = len(foot) > 1 and room > min(len(lanes), 3)
        room -= keyed  # one line for the legend
        first = max(0, min(self.cursor_row - room // 2, len(lanes) - room))
        window = self._window(pipeline, width - left - numbers)
        self._layout = _Layout(pipeline, window, left, first, 1, room)
        lines = [StripLine().pad_to(left, colours.dim).extend(ruler(window, colours))]
        if numbers:
            lines[0].pad_to(width - numbers, colours.dim).add("    busy  uneven  idle", colours.dim)
        rows = range(first, min(first + room, len(lanes)))
        lines += [self._row(pipeline, row, window, left, numbers, colours) for row in rows]
        if keyed:
            lines.append(self._legend(pipeline, lanes[self.cursor_row], window, room, colours))
        lines += foot
        if step is not None and self._alone and height - len(lines) > 2:
            lines.append(StripLine())
            lines += comparison_lines(store, step, width, height - len(lines), colours)
        return lines

    @property
    def _alone(self) -> bool:
        """Whether this panel fills the screen; then it also compares the step with the usual step."""
        return self.screen.has_class("-solo")

    def _why(self, store: Store, step: int | None) -> str:
        """Why the panel shows phases instead of a timeline; "" in a run without pipeline parallelism."""
        if stage_count(store) < 2:
            return ""
        if step is None or not store.timelines.steps:
            return "no timeline has been sampled yet: the phases of each rank instead"
        kept = store.timelines.steps
        before = max((one for one in kept if one < step), default=None)
        after = min((one for one in kept if one > step), default=None)
        near = " and ".join(format.grouped(one) for one in (before, after) if one is not None)
        return f"no timeline of step {format.grouped(step)} is kept (nearest: {near}): its phases instead"

    def _window(self, pipeline: Pipeline, cells: int) -> Window:
        cells = max(1, cells)
        whole = pipeline.window_ms
        length = min(self.length_ms or whole, whole)
        start = max(0.0, min(self.start_ms, whole - length))
        return Window(start, length, cells)

    def _follow_rank(self, store: Store, lanes: tuple[Lane, ...]) -> None:
        """If a rank was selected in another panel, move the cursor to the row of the rank or of its stage."""
        rank = self.selection.rank
        if rank == self._followed_rank or rank is None:
            return
        self._followed_rank = rank
        if lanes[min(self.cursor_row, len(lanes) - 1)].pp != store.stage_of(rank):
            rows = (row for row, lane in enumerate(lanes) if lane.pp == store.stage_of(rank))
            self.cursor_row = next(rows, self.cursor_row)

    def _row(
        self, pipeline: Pipeline, row: int, window: Window, left: int, numbers: int, colours: Palette
    ) -> StripLine:
        """One row of the timeline, redrawn only if its content has changed: a row may have thousands of actions."""
        lane = pipeline.lanes[row]
        chosen = row == self.cursor_row
        if (now := (pipeline, window, left, numbers, id(colours))) != self._rows_of:
            self._rows_of, self._rows = now, {}
        here = at(lane, self.cursor_ms) if chosen else None
        cell = int(window.cell(self.cursor_ms)) if here and here.action is None else None
        key = (row, chosen, here.start_ms if here else None, cell)
        if key in self._rows:
            return self._rows[key]
        label = colours.cursor if chosen else colours.text
        line = self._rows[key] = StripLine().add(lane.label, label).pad_to(left, colours.dim)
        if lane.rank is None:
            missing(line, window.cells, colours)
        else:
            lane_cells(line, lane, window, colours, here.action if here else None, cell)
        if numbers:
            _numbers(line, pipeline, lane, colours)
        return line

    def _legend(
        self, pipeline: Pipeline, lane: Lane, window: Window, room: int, colours: Palette
    ) -> StripLine:
        count = len(lane.actions)
        folded = bool(count) and lane.busy_ms / count < window.cell_ms
        line = StripLine()
        if len(pipeline.lanes) > room and self._layout:
            last = min(self._layout.first + room, len(pipeline.lanes))
            line.add(f"rows {self._layout.first + 1}–{last} of {len(pipeline.lanes)}  ", colours.accent)
        line.extend(legend(lane, folded, colours))
        return line

    # ------------------------------------------------------------------------------------------ keys

    def action_row(self, by: int) -> None:
        if self._layout is None:
            self.bars.move(by)
        else:
            lanes = self._layout.pipeline.lanes
            self.cursor_row = max(0, min(self.cursor_row + by, len(lanes) - 1))
            self._select_rank()
        self.redraw()

    def _select_rank(self) -> None:
        if self._layout and (rank := self._layout.pipeline.lanes[self.cursor_row].rank) is not None:
            self.selection.rank = self._followed_rank = rank

    def action_move(self, by: int) -> None:
        """Move the cursor to the start of the next action or idle gap that is at least one terminal cell away."""
        if self._layout is None:
            return
        lane, window = self._layout.pipeline.lanes[self.cursor_row], self._layout.window
        edges = stops(lane, window.cell_ms)
        if by > 0:
            ahead = (edge for edge in edges if edge >= self.cursor_ms + window.cell_ms)
            self.cursor_ms = next(ahead, self.cursor_ms)
        else:
            behind = (edge for edge in reversed(edges) if edge <= self.cursor_ms - window.cell_ms)
            self.cursor_ms = next(behind, 0.0)
        if lane.window_ms:
            self.cursor_ms = min(self.cursor_ms, lane.window_ms)
        self._follow()
        self.redraw()

    def _follow(self) -> None:
        """Move a zoomed window so that it contains the cursor."""
        if self.length_ms is None:
            return
        if self.cursor_ms < self.start_ms:
            self.start_ms = max(0.0, self.cursor_ms - self.length_ms / 4)
        elif self.cursor_ms >= self.start_ms + self.length_ms:
            self.start_ms = self.cursor_ms - 3 * self.length_ms / 4

    def action_zoom(self, by: float) -> None:
        """Zoom the time axis: the visible window becomes `by` times as long. The new window is centred on the cursor
        if the old window contains it, else on the centre of the old window."""
        if self._layout is None:
            return
        whole, window = self._layout.pipeline.window_ms, self._layout.window
        length = max(SHORTEST_MS, window.length_ms * by)
        if length >= whole:
            self.length_ms, self.start_ms = None, 0.0
        else:
            inside = 0 <= window.cell(self.cursor_ms) < window.cells
            middle = self.cursor_ms if inside else window.start_ms + window.length_ms / 2
            self.length_ms = length
            self.start_ms = max(0.0, min(middle - length / 2, whole - length))
        self.redraw()

    def action_whole(self) -> None:
        self.length_ms, self.start_ms = None, 0.0
        self.redraw()

    def action_pan(self, by: float) -> None:
        if self._layout and self.length_ms is not None:
            whole = self._layout.pipeline.window_ms
            self.start_ms = max(0.0, min(self.start_ms + by * self.length_ms, whole - self.length_ms))
            self.cursor_ms = max(self.start_ms, min(self.cursor_ms, self.start_ms + 0.999 * self.length_ms))
            self.redraw()

    def action_replica(self) -> None:
        with self._store.lock:
            found = pipelines(self._store, self._step(self._store))
            if found:
                self.replica = found[(self._which(self._store, found) + 1) % len(found)].label
        self.redraw()

    def action_rows(self) -> None:
        self.by_stage = not self.by_stage
        self.cursor_row = 0
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is None or self._layout is None:
            return
        row = self._layout.first + place.y - self._layout.top
        if place.y >= self._layout.top and row < len(self._layout.pipeline.lanes):
            self.cursor_row = row
            cell = place.x - self._layout.left
            if 0 <= cell < self._layout.window.cells:
                self.cursor_ms = self._layout.window.ms(cell + 0.5)
            self._select_rank()
            self.redraw()


def _numbers(line: StripLine, pipeline: Pipeline, lane: Lane, colours: Palette) -> None:
    """Add a lane's busy time, its excess over the median busy time of all lanes, and the lane's idle share."""
    over = excess(pipeline, lane) if len(pipeline.lanes) > 1 else None
    slow = over is not None and over > UNEVEN
    style = colours.level[Level.WARN] if slow else colours.text
    line.add(format.duration_ms(lane.busy_ms if lane.rank is not None else None).rjust(8), style)
    line.add(("" if over is None else format.excess(over)).rjust(7) + ("!" if slow else " "), style)
    line.add(format.percent(lane.idle, 4), colours.dim)
