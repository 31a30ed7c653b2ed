"""Panel with the pipeline timeline of one step: a row per stage, a block per forward or backward."""

from agents.protocol import Timeline
from cockpit.data import format
from cockpit.data.history.metric_table import PHASE
from cockpit.data.metrics import median
from cockpit.data.pipeline.pipelines import Lane, lane_of
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.phase_bars import bar_label, phase_styles
from cockpit.tui.widgets.pipeline.tracks import IDLE, Window, lane_cells

SIDE = 31
FEW = 4  # up to this many stages, each stage has a second line
WORDS = ("busy ", "bubble ", "bound ")


class PipelinePanel(Panel):
    """The panel of the newest sampled step of each stage, with the measured bubble and the bubble that the schedule
    cannot avoid."""

    TOPICS = frozenset({Topic.PIPELINE, Topic.RANKS})
    TITLE = "Pipeline"
    OPENS = "pipeline"
    NATURAL = True
    HELP = (
        "One row per pipeline rank, time to the right: `F` forward, `B` backward (input gradients only if a `W` for "
        "the weight gradients follows), numbered by micro-batch; several stages of one rank have letters and different "
        "shades. A thin line is idle time, the bubble. Busy and bubble are measured (median over the ranks of the "
        "row); bound is the bubble that the schedule cannot avoid. Idle time is split into the bubble of the schedule, "
        "further waiting for other stages, and overhead. A run without a pipeline shows its phases: the median of each."
    )

    def title(self, store: Store) -> str:
        knobs = {knob.name: knob.value for knob in store.state.board.knobs} if store.state.board else {}
        schedule = knobs.get("schedule") or store.fact("schedule")
        if _without_pipeline(store):
            return "Phases of a step"
        parts = ["Pipeline", *([format.clean(str(schedule))] if schedule else [])]
        micro = knobs.get("micro_batches")
        if micro is not None:
            parts.append(f"{format.knob(micro)} micro-batches")
        return " · ".join(parts)

    def subtitle(self, store: Store) -> str:
        steps = [timeline.step for timeline in store.state.timelines.values()]
        words = [f"step {format.grouped(max(steps))}"] if steps else []
        summary = store.summary
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
            return _phases(store, width, colours)
        stages = _stages(store)
        shown = store.once("newest lanes", (Topic.PIPELINE, Topic.GRID), lambda: _newest(store))
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
                _numbers(line.add(" ", colours.dim), store, ranks, colours, ("", "", ""))
                lines += [StripLine()] * (len(stages) <= FEW)
            elif under:
                lines.append(_numbers(StripLine().pad_to(name, colours.dim), store, ranks, colours, WORDS))
        return lines


def _stages(store: Store) -> dict[int, list[int]]:
    """The ranks of each stage; a run without pipeline parallelism has one stage."""
    return store.once("stages", (Topic.GRID,), lambda: _find_stages(store))


def _find_stages(store: Store) -> dict[int, list[int]]:
    stages: dict[int, list[int]] = {}
    for rank, hello in sorted(store.state.hellos.items()):
        stages.setdefault(hello.coords.get("pp", 0), []).append(rank)
    return dict(sorted(stages.items()))


def _newest(store: Store) -> dict[int, Lane]:
    """The lane of the newest timeline of each stage."""
    found: dict[int, Timeline] = {}
    for rank, timeline in store.state.timelines.items():
        pp = store.stage_of(rank)
        if pp not in found or timeline.step > found[pp].step:
            found[pp] = timeline
    return {pp: lane_of(pp, timeline) for pp, timeline in found.items()}


def _without_pipeline(store: Store) -> bool:
    return len(_stages(store)) < 2 and not store.state.timelines


def _phases(store: Store, width: int, colours: Palette) -> list[StripLine]:
    """A bar with the median of each phase over the ranks, in a run without a pipeline."""
    names = store.rank_history.phases
    steps = store.state.steps.values()
    found = {PHASE + name: median(s.phases[name] for s in steps if name in s.phases) or 0.0 for name in names}
    whole = max(median(step.step_ms for step in steps) or 0.0, sum(found.values()))
    if not found or not whole:
        why = "no phases are reported yet" if not steps else "this run reports no phases"
        return [StripLine().add(f"{format.MISSING} {why}", colours.dim)]
    head = f"median over {len(steps)} ranks · {format.duration_ms(whole).strip()} a step"
    styles = phase_styles(list(found), colours)
    line, end = StripLine(), 0.0
    for name, ms in found.items():
        begin, end = end, end + ms
        cells = round(end / whole * width) - round(begin / whole * width)
        share = f"{100 * ms / whole:.0f} %"
        line.add(bar_label(f"{format.clean(name.removeprefix(PHASE))} {share}", share, cells), styles[name])
    return [StripLine().add(head, colours.dim), line.pad_to(width, colours.faint, IDLE)]


def _numbers(
    line: StripLine, store: Store, ranks: list[int], colours: Palette, words: tuple[str, str, str]
) -> StripLine:
    """Add the measured busy time and bubble, and the bubble that the schedule cannot avoid: medians over the stage's
    ranks."""
    steps = [store.state.steps[rank] for rank in ranks if rank in store.state.steps]
    bubble = median(step.bubble for step in steps if step.bubble is not None)
    bound = median(step.bubble_bound for step in steps if step.bubble_bound is not None)
    values = (None if bubble is None else 1 - bubble, bubble, bound)
    for i, (word, value) in enumerate(zip(words, values, strict=True)):
        line.add(
            f"{word}{format.percent(value, 5)}   ", colours.dim if i == 2 or words is WORDS else colours.text
        )
    return line
