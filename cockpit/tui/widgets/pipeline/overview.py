"""Panel with the pipeline timeline of one step: a row per stage, a block per forward or backward."""

from agents.protocol import Timeline
from cockpit.data import format
from cockpit.data.metrics import median
from cockpit.data.pipelines import Lane
from cockpit.data.store import Store, Topic
from cockpit.tui.strips import StripLine
from cockpit.tui.theme import Palette
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.tracks import Window, lane_cells

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
        "further waiting for other stages, and overhead."
    )

    def title(self, store: Store) -> str:
        knobs = {knob.name: knob.value for knob in store.state.board.knobs} if store.state.board else {}
        schedule = knobs.get("schedule") or store.fact("schedule")
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
        return stages * (2 if stages <= FEW else 1) + 1

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        stages = _stages(store)
        shown = {pp: _newest(store, ranks) for pp, ranks in stages.items()}
        window = max((t.window_ms for t in shown.values() if t), default=0.0)
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
            timeline = shown[pp]
            if timeline and window:
                actions = tuple(sorted(timeline.actions, key=lambda action: action.start_ms))
                lane_cells(
                    line, Lane(pp, timeline.rank, actions), Window(0.0, window, track), colours, None, None
                )
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


def _newest(store: Store, ranks: list[int]) -> Timeline | None:
    found = [store.state.timelines[rank] for rank in ranks if rank in store.state.timelines]
    return max(found, key=lambda timeline: timeline.step, default=None)


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
