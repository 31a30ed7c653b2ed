"""Panel with the planner's advice. Further views show the roofline and the scaling curves that the run would
have with the hypothetical values of the what-if panel."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.quantities import ms, sent, thousands
from cockpit.data.store import Store, Topic
from cockpit.knobs.advice import NONE_FASTER, ON_THE_BOARD, interval_text, likely_text
from cockpit.knobs.plan.model import WhatIf
from cockpit.tui.drawing.strips import LEAST_WRAPPED, StripLine, bar, paragraph, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import PLAN, PLAN_VIEW_KEYS
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.plan.parts import COMPUTING, size, without_plan

if TYPE_CHECKING:
    from cockpit.knobs.plan.suggestions import Suggestions
    from engine.planner.advice import Advice
    from engine.planner.roofline import Level as Links
    from engine.planner.scaling import Point

VIEWS = {
    "advice": "Advice · planned",
    "roofline": "Roofline · planned",
    "strong": "Strong scaling · planned",
    "weak": "Weak scaling · planned",
}
SUBTITLES = {
    "advice": "",
    "roofline": "",
    "strong": "same global batch · planner alone",
    "weak": "same batch per rank · planner alone",
}
MOST = 5  # changes of each group
WORDS = 24  # columns of a change


class AdvicePanel(Panel):
    """The panel with the ranked changes, the roofline, or the scaling curves."""

    TOPICS = frozenset({Topic.BOARD, Topic.GRID, Topic.EVENTS})
    TITLE = "Advice"
    BINDINGS: ClassVar[list[Binding]] = PLAN_VIEW_KEYS  # type: ignore[assignment]
    ACTIONS = tuple(action for action in PLAN if action.id == "plan.view")
    EVERY = 4
    HELP = (
        "The measured bottleneck of the run, then changes of one setting that would make steps faster, each with the "
        "interval of the change in step time. Changes that the knob board can make now come first, then those that "
        "need a restart; in each group, the best is first. Changes that do not fit, or that were no faster in a trial "
        "of this run, are listed without a rank and with the reason. `v` shows the roofline instead: what bounds a "
        "step on each level of links if everything overlaps. `v` again shows strong and weak scaling: the job on more "
        "data-parallel ranks. Roofline and scaling include the hypothetical values of the what-if. All values except "
        "the bottleneck are planned."
    )

    def __init__(self, model: WhatIf, views: Sequence[str] = tuple(VIEWS), id: str = "advice") -> None:
        super().__init__(id)
        self.model = model
        self.views = views
        self.view = views[0]

    def next_view(self) -> None:
        names = self.views
        self.view = names[(names.index(self.view) + 1) % len(names)]
        self.redraw()

    def choice(self) -> object:
        return self.model.version(), self.view

    def title(self, store: Store) -> str:
        return VIEWS[self.view]

    def subtitle(self, store: Store) -> str:
        following = self.views[(self.views.index(self.view) + 1) % len(self.views)]
        return " · ".join(
            filter(None, (SUBTITLES[self.view], f"v: {VIEWS[following].partition(' ·')[0].lower()}"))
        )

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        model = self.model
        model.update(store)
        if missing := without_plan(model, width, height, colours, brief=True):
            return missing
        answer = model.suggestions(store) if self.view == "advice" else model.chart(self.view)
        if answer is None:
            return [StripLine().add(f"{format.MISSING} {COMPUTING}", colours.faint)]
        if answer.refusal:
            return _wrapped(f"{format.MISSING} {answer.refusal}", width, colours)
        if self.view == "advice":
            return _advice(answer.value, width, height, colours)
        if self.view == "roofline":
            return [line for links in answer.value for line in _level(links, width, colours)]
        return _scaling(answer.value, width, colours)


def _wrapped(text: str, width: int, colours: Palette) -> list[StripLine]:
    return paragraph(text, width, colours.dim, hanging=2)


# ----------------------------------------------------------------------------------------------- advice


def _advice(found: "Suggestions", width: int, height: int, colours: Palette) -> list[StripLine]:
    lines = []
    if cause := found.live.bottleneck:
        lines += [
            StripLine().add(part, colours.strong)
            for part in format.wrapped(format.spaced(cause.sentence), width)
        ]
    if found.live.why_not:
        return lines + _wrapped(found.live.why_not, width, colours)
    for title, advice in ((ON_THE_BOARD, found.live), ("with a restart", found.restart)):
        lines.append(rule(f"{title}: step time, planned peak", width, colours.dim, colours.line))
        lines += ranked_lines(advice, found.peaks, width, colours)
    for sentence in (*found.live.left_out, *found.restart.left_out):
        lines += _wrapped(f"{format.MISSING} {sentence}", width, colours)
    if len(lines) > height > 1:
        rest = len(lines) - height + 1
        lines = [*lines[: height - 1], StripLine().add(f"… {rest} more lines: z", colours.faint)]
    return lines


def ranked_lines(advice: "Advice", peaks: dict[str, float], width: int, colours: Palette) -> list[StripLine]:
    """Lines such as ``1 micro_batches=16   step -10.2 .. -6.0 % (-8.1)   42.0 GiB``. The interval is green if both of
    its ends are below 0 %."""
    lines = []
    for place, one in enumerate(advice.ranked[:MOST], start=1):
        words = one.candidate.words
        line = (
            StripLine().add(f"{place} ", colours.dim).add(f"{format.clean(words):<{WORDS}}", colours.strong)
        )
        tone = colours.level[Level.GOOD] if one.least > 0 else colours.text
        digits = 1 if width >= 70 else 0
        line.add(f" {interval_text(one, digits):>{14 + 3 * digits}}", tone)
        if digits:
            line.add(f" ({likely_text(one)})", colours.dim)
        line.add(f"  {size(peaks[words])}", colours.text)
        lines.append(line)
    if more := len(advice.ranked) - MOST:
        lines += [StripLine().add(f"  and {more} more", colours.faint)] if more > 0 else []
    return lines or [StripLine().add(f"  {NONE_FASTER}", colours.dim)]


# -------------------------------------------------------------------------------- roofline and scaling


def _level(links: "Links", width: int, colours: Palette) -> list[StripLine]:
    """Lines about one level of the network: what limits the step time at this level, and how long a step would take if
    it were limited only by computation, only by bandwidth, or only by message latency."""
    lines = [
        rule(f"{links.link.name} · {links.bytes_per_s / 1e9:.3g} GB/s", width, colours.text, colours.line)
    ]
    if not links.sent:
        return [*lines, StripLine().add("  the job sends nothing over it", colours.dim)]
    size_, unit = sent(links.sent)
    line = StripLine().add("  bound by ", colours.dim).add(links.regime, colours.strong)
    line.add_fitting(
        width,
        [(f" · {size_} {unit} a step", colours.dim)],
        [(f" · {format.grouped(links.ccr)} FLOPs a byte", colours.dim)],
        [(f", ridge {format.grouped(links.ridge)}", colours.dim)],
    )
    lines.append(line)
    longest = max(links.seconds.values())
    for cause, seconds in links.seconds.items():
        number, unit = ms(1e3 * seconds) if seconds >= 1e-3 else (f"{1e3 * seconds:.2g}", "ms")
        tone = colours.strong if cause == links.regime else colours.text
        line = StripLine().add(f"  {cause:<9}", tone)
        line.add(bar(seconds / longest if longest else 0.0, max(4, width - 24)), colours.accent)
        lines.append(line.add(f" {number:>7} {unit}", tone))
    return [*lines, *paragraph(f"→ {links.advice}", width, colours.text, 2, hanging=4)]


def _scaling(points: "list[Point]", width: int, colours: Palette) -> list[StripLine]:
    """The table of a scaling curve, one line per number of ranks. The line
    ``2 048  61 440  23.5 s  2.7 M  34.4 %  ████████ 99.8 %  compute`` means: 2048 ranks, a global batch of 61,440
    sequences, 23.5 s per step, 2.7 million tokens/s, 34.4 % MFU, a scaling efficiency of 99.8 %, and steps bound by
    compute."""
    wide = width >= 66
    head = f"{'ranks':>8}{'batch' if wide else '':>{9 * wide}}{'step':>10}{'tok/s':>10}"
    lines = [StripLine().add(f"{head}{'MFU' if wide else '':>{8 * wide}}  efficiency", colours.dim)]
    for point in points:
        line = StripLine().add(f"{format.grouped(point.ranks):>8}", colours.strong)
        time = point.prediction
        if time is None:
            at = line.width + 2
            first, *more = format.wrapped(format.clean(point.refusal), max(LEAST_WRAPPED, width - at - 2))
            lines.append(line.add(f"  {format.MISSING} {first}", colours.faint))
            lines += [StripLine().pad_to(at + 2, colours.faint).add(part, colours.faint) for part in more]
            continue
        step, rate = ms(1e3 * time.step_s[1]), thousands(time.tokens_per_s)
        if wide:
            line.add(f"{format.grouped(point.batch):>9}", colours.text)
        line.add(f"{' '.join(step):>10}{' '.join(rate):>10}", colours.text)
        line.add(f"{100 * time.mfu:>6.1f} %" if wide else "", colours.text).add("  ", colours.text)
        line.add(bar(point.efficiency, max(4, width - (66 if wide else 48))), colours.accent)
        line.add(f" {100 * point.efficiency:5.1f} %", colours.strong)
        lines.append(line.add(f"  {time.bound_by[0]}", colours.dim))
    return lines
