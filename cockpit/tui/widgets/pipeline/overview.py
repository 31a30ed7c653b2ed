"""Overview panel with the pipeline timeline of one step: one row per stage, and one block per forward or backward
pass."""

from agents.protocol import Timeline, Value
from cockpit.data import format
from cockpit.data.history.metric_table import PHASE
from cockpit.data.history.rank_values import BOUND, BUBBLE
from cockpit.data.metrics import median
from cockpit.data.pipeline.pipelines import Lane, lane_of, pipelines
from cockpit.data.pipeline.step_comparison import phases_at
from cockpit.data.store import Store, Topic
from cockpit.data.traffic.traffic import summary_at
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.phase_bars import bar_label, phase_styles
from cockpit.tui.widgets.pipeline.tracks import IDLE, Window, lane_cells

SIDE = 31
FEW = 4  # up to this many stages, each stage has a second line
WORDS = ("busy ", "bubble ", "bound ")


class PipelinePanel(Panel):
    """The panel with the pipeline timeline of the selected step or, if no step is selected, of each stage's newest
    sampled step. The panel also shows the measured bubble and the bubble that the schedule cannot avoid."""

    TOPICS = frozenset({Topic.PIPELINE, Topic.RANKS})
    TITLE = "Pipeline"
    OPENS = "pipeline"
    NATURAL = True
    HELP = (
        "Each row is a pipeline rank, and time runs to the right. `F` is forward and `B` backward, numbered by "
        "micro-batch. If a `W` for the weight gradients follows, `B` computes only the input gradients. If a rank has "
        "several stages, letters and shades distinguish them. A thin line is idle time, the bubble. Busy and bubble "
        "are measured, as medians over the ranks of the row; bound is the mean bubble over all stages that the "
        "schedule cannot avoid, so a stage with more work than the others can be below it. Idle time is split into the "
        "bubble of the schedule, further waiting for other stages, and overhead. A run without "
        "a pipeline shows the median of each phase instead."
    )

    def __init__(self, selection: Selection, id: str = "pipeline") -> None:
        super().__init__(id)
        self._selection = selection

    def choice(self) -> object:
        return self._selection.step

    def title(self, store: Store) -> str:
        knobs = {knob.name: knob.value for knob in store.state.board.knobs} if store.state.board else {}
        schedule = knobs.get("schedule") or store.fact("schedule")
        if _without_pipeline(store):
            return "Phases of a step"
        parts = ["Pipeline", *([format.clean(str(schedule))] if schedule else [])]
        micro = knobs.get("micro_batches")
        if micro is not None and self._selection.step is None:  # the knob has the current value
            parts.append(micro_batches_text(micro))
        return " · ".join(parts)

    def subtitle(self, store: Store) -> str:
        step = self._selection.step
        steps = [timeline.step for timeline in store.state.timelines.values()]
        words = [f"step {format.grouped(max(steps))}"] if steps else []
        summary = summary_at(store, step)
        if step is not None:
            kept = phases_at(store, step) if _without_pipeline(store) else store.timelines.at(step)
            words = [f"step {format.grouped(step)}" + ("" if kept else " is not kept")]
        if summary and summary.bubble_parts:
            words.append(f"idle {format.shares_text(summary.bubble_parts)}")
        return " · ".join(words)

    def natural_height(self, store: Store) -> int:
        stages = len(_stages(store))
        if _without_pipeline(store):
            return 2
        return stages * (2 if stages <= FEW else 1) + 1

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        if _without_pipeline(store):
            return _phases(store, self._selection.step, width, colours)
        stages, step = _stages(store), self._selection.step
        shown = store.once("shown lanes", (Topic.PIPELINE, Topic.GRID), lambda: _lanes(store, step), step)
        if step is not None and not shown:
            return _no_lanes(store, step, colours)
        window = max((lane.window_ms for lane in shown.values()), default=0.0)
        name = max((len(f"pp{pp}") for pp in stages), default=0) + 1
        # The numbers go beside the track if it stays wide enough, else under it, else they are omitted.
        beside = width >= 100
        under = not beside and len(stages) * 2 < height
        track = width - name - (SIDE if beside else 0)
        ends = f"{format.duration_ms(window).strip()}" if window else ""
        head = (
            StripLine()
            .pad_to(name, colours.dim)
            .add("0", colours.dim)
            .add(ends.rjust(track - 1), colours.dim)
        )
        if beside:
            head.add("    busy    bubble     bound", colours.dim)
        lines = [head]
        for pp, ranks in stages.items():
            line = StripLine().add(f"pp{pp}".ljust(name), colours.text)
            lane = shown.get(pp)
            if lane and window:
                lane_cells(line, lane, Window(0.0, window, track), colours, None, None)
            else:
                line.add((format.MISSING * track), colours.faint)
            lines.append(line)
            if beside:
                _numbers(line.add(" ", colours.dim), _idle(store, step, pp, ranks), colours, ("", "", ""))
                lines += [StripLine()] * (len(stages) <= FEW)
            elif under:
                numbers = StripLine().pad_to(name, colours.dim)
                lines.append(_numbers(numbers, _idle(store, step, pp, ranks), colours, WORDS))
        return lines


def _stages(store: Store) -> dict[int, list[int]]:
    """The ranks of each stage; a run without pipeline parallelism has one stage."""
    return store.once("stages", (Topic.GRID,), lambda: _find_stages(store))


def _find_stages(store: Store) -> dict[int, list[int]]:
    stages: dict[int, list[int]] = {}
    for rank, hello in sorted(store.state.hellos.items()):
        stages.setdefault(hello.coords.get("pp", 0), []).append(rank)
    return dict(sorted(stages.items()))


def _lanes(store: Store, step: int | None) -> dict[int, Lane]:
    """The lane of each stage in the timeline of `step` or, if `step` is None, in the stage's newest timeline."""
    if step is not None:
        pipeline = next(iter(pipelines(store, step)), None)
        return {lane.pp: lane for lane in pipeline.lanes if lane.rank is not None} if pipeline else {}
    found: dict[int, Timeline] = {}
    for rank, timeline in store.state.timelines.items():
        pp = store.stage_of(rank)
        if pp not in found or timeline.step > found[pp].step:
            found[pp] = timeline
    return {pp: lane_of(pp, timeline) for pp, timeline in found.items()}


def micro_batches_text(count: Value) -> str:
    """The value of the knob `micro_batches` as text, such as ``1 micro-batch``."""
    if isinstance(count, int):
        return format.counted(count, "micro-batch")
    return f"{format.knob(count)} micro-batches"


def _without_pipeline(store: Store) -> bool:
    return len(_stages(store)) < 2 and not store.state.timelines


def _no_lanes(store: Store, step: int, colours: Palette) -> list[StripLine]:
    """A line that says that the selected step has no timeline, and names the nearest steps that have one."""
    kept = store.timelines.steps
    near = [
        max((at for at in kept if at < step), default=None),
        min((at for at in kept if at > step), default=None),
    ]
    names = " and ".join(format.grouped(at) for at in near if at is not None)
    text = f"no timeline of step {format.grouped(step)} is kept" + (
        f", the nearest: {names}" if names else ""
    )
    return [StripLine().add(f"{format.MISSING} {text}", colours.faint)]


def _phases(store: Store, step: int | None, width: int, colours: Palette) -> list[StripLine]:
    """A bar for each phase with its median over the ranks, for a run without a pipeline."""
    if step is None:
        steps = store.state.steps.values()
        found = {
            PHASE + name: median(s.phases[name] for s in steps if name in s.phases) or 0.0
            for name in store.rank_history.phases
        }
        count, whole = len(steps), median(record.step_ms for record in steps) or 0.0
    else:
        phases = phases_at(store, step)
        if phases is None:
            text = f"{format.MISSING} step {format.grouped(step)} is not kept"
            return [StripLine().add(text, colours.faint)]
        spreads = {
            name: phases.spread(name, phases.stages[0]) for name in phases.spreads if name.startswith(PHASE)
        }
        found = {name: spread.median for name, spread in spreads.items() if spread.known}
        count, whole = phases.ranks, phases.step_ms
    whole = max(whole, sum(found.values()))
    if not found or not whole:
        why = "no phases are reported yet" if not count else "this run reports no phases"
        return [StripLine().add(f"{format.MISSING} {why}", colours.dim)]
    head = f"median over {format.counted(count, 'rank')} · {format.duration_ms(whole).strip()} a step"
    styles = phase_styles(list(found), colours)
    line, end = StripLine(), 0.0
    for name, ms in found.items():
        begin, end = end, end + ms
        cells = round(end / whole * width) - round(begin / whole * width)
        share = f"{100 * ms / whole:.0f} %"
        line.add(bar_label(f"{format.clean(name.removeprefix(PHASE))} {share}", share, cells), styles[name])
    return [StripLine().add(head, colours.dim), line.pad_to(width, colours.faint, IDLE)]


def _idle(store: Store, step: int | None, pp: int, ranks: list[int]) -> tuple[float | None, float | None]:
    """The measured bubble of a stage and the bubble that the schedule cannot avoid, both as medians over the stage's
    ranks."""
    if step is not None:
        phases = phases_at(store, step)
        spreads = [phases.spread(name, pp) for name in (BUBBLE, BOUND)] if phases else []
        known = [spread.median if spread.known else None for spread in spreads]
        return (known[0], known[1]) if known else (None, None)
    steps = [store.state.steps[rank] for rank in ranks if rank in store.state.steps]
    return (
        median(record.bubble for record in steps if record.bubble is not None),
        median(record.bubble_bound for record in steps if record.bubble_bound is not None),
    )


def _numbers(
    line: StripLine, idle: tuple[float | None, float | None], colours: Palette, words: tuple[str, str, str]
) -> StripLine:
    """Append three percentages to `line`: the busy time, the bubble, and the lower bound of the bubble. Each is a share
    of the time from the start of a step's pipeline to the end of its last action."""
    bubble, bound = idle
    values = (None if bubble is None else 1 - bubble, bubble, bound)
    for i, (word, value) in enumerate(zip(words, values, strict=True)):
        line.add(
            f"{word}{format.percent(value, 5)}   ", colours.dim if i == 2 or words is WORDS else colours.text
        )
    return line
