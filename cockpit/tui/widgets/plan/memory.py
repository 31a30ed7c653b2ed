"""Panel with the memory of each pipeline rank by component, compared with the memory of the device. The panel shows the
memory that the planner predicts beside the measured memory, and how much memory each recompute mode and ZeRO stage
would save."""

from typing import TYPE_CHECKING

from rich.style import Style

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.store import Store, Topic
from cockpit.knobs.plan.effect import RankMemory, measured_memory
from cockpit.knobs.plan.model import Alternative, WhatIf
from cockpit.tui.drawing.strips import StripLine, paragraph, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.plan.parts import COMPUTING, change_text, signed_size, size, verdict, without_plan

if TYPE_CHECKING:
    from cockpit.knobs.plan.outlook import Outlook

NAMES = {
    "parameters": "weights",
    "gathered": "gathered weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "moe": "MoE buffers",
    "logits": "logits",
    "working": "working",
    "pipeline": "pipeline buffers",
    "framework": "libraries (assumed)",
    "checkpoint": "copy for checkpoints",
}
LETTERS = {
    "parameters": "W",
    "gathered": "H",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "moe": "M",
    "logits": "L",
    "working": "B",
    "pipeline": "P",
    "framework": "F",
    "checkpoint": "C",
}
LEAST_BARS = 4  # lines
NUMBERS = 11  # columns of a size
LIMIT = "┃"


class MemoryPanel(Panel):
    """The memory that the planner predicts for each pipeline rank, as a bar of its components."""

    TOPICS = frozenset({Topic.RANKS, Topic.GRID, Topic.BOARD})
    TITLE = "Memory"
    EVERY = 2
    HELP = (
        "Each bar is the planned peak of a pipeline rank by component; `┃` is the memory of a device. The letters are "
        "W weights, H gathered weights, G gradients, O optimizer, A activations, M buffers of routed rows, L logits, B "
        "memory for the backward of a layer, P buffers between stages, F libraries. `measured` is the worst rank of "
        "the stage: on GPUs the peak of its tensors, on CPUs the resident memory of its process, which includes "
        "libraries and memory that the allocator keeps. `device` is all memory in use on its device. The lines below "
        "the bars show what each recompute mode and ZeRO stage would need and cost. All values except `measured` and "
        "`device` are planned."
    )

    def __init__(self, model: WhatIf) -> None:
        super().__init__("memory")
        self.model = model

    def choice(self) -> object:
        return self.model.version()

    def subtitle(self, store: Store) -> str:
        return "planned beside measured"

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        model = self.model
        model.update(store)
        if missing := without_plan(model, width, height, colours, brief=True):
            return missing + _only_measured(store, width, colours)
        now = model.outlook({})
        if now is None:
            return [StripLine().add(f"{format.MISSING} {COMPUTING}", colours.faint)]
        if now.refusal:
            return paragraph(f"{format.MISSING} {now.refusal}", width, colours.text, hanging=2)
        outlook: Outlook = now.value
        then = model.outlook(model.changes) if model.changes else None
        after: Outlook | None = then.value if then and not then.refusal else None
        savings = self._savings(outlook, width, colours)
        head = verdict(outlook, width, colours)
        parts = _components(outlook, after, width, colours)
        room = max(height - 1 - len(parts) - len(savings), min(LEAST_BARS, height - 1))
        bars = _bars(outlook, store, width, room, colours)
        lines = [head, *bars]
        if len(lines) + len(parts) + len(savings) > height:
            parts = parts[: max(0, height - len(lines) - len(savings))]
        return [*lines, *parts, *savings]

    def _savings(self, now: "Outlook", width: int, colours: Palette) -> list[StripLine]:
        answer = self.model.alternatives()
        lines = [rule("each mode: planned peak, saves, step time", width, colours.dim, colours.line)]
        if answer is None or answer.refusal:
            text = COMPUTING if answer is None else answer.refusal
            return [*lines, *paragraph(f"{format.MISSING} {text}", width, colours.faint, 2, hanging=4)]
        found: list[Alternative] = answer.value
        return lines + [_saving(one, now, width, colours) for one in found if one.outlook]


def _only_measured(store: Store, width: int, colours: Palette) -> list[StripLine]:
    """Lines with the measured memory, for a run whose memory the planner cannot predict."""
    found = measured_memory(store)
    lines = []
    for pp, one in sorted(found.items()):
        line = StripLine().add(f"  pp{pp}  worst rank {one.rank}: ", colours.dim)
        line.add(size(one.step or 0).strip(), colours.strong).add(" measured", colours.dim)
        device = f" · device {size(one.device).strip()}" if one.device else ""
        lines.append(line.add_fitting(width, [(device, colours.dim)]))
    return lines or [StripLine().add("  no rank measures its memory", colours.faint)]


# ------------------------------------------------------------------------------------------------ bars


def _bars(outlook: "Outlook", store: Store, width: int, room: int, colours: Palette) -> list[StripLine]:
    """One memory bar per pipeline rank. If not all bars fit, the ranks that need the most memory are shown."""
    measured, ranks = measured_memory(store), outlook.memory.ranks
    order = sorted(range(len(ranks)), key=lambda pp: -ranks[pp].total)
    shown = sorted(order[: max(1, room - 1)] if len(order) > room else order)
    top = max([outlook.capacity or 0.0, *(rank.total for rank in ranks)])
    widest = len(str(len(ranks) - 1)) + 3
    with_device = width >= 100 and any(one.device for one in measured.values())
    lines = []
    cells = width - widest - NUMBERS - 2 - (12 + NUMBERS) - (9 + NUMBERS if with_device else 0)
    for pp in shown:
        worst = pp == outlook.memory.worst_rank
        line = StripLine().add(f"pp{pp}".ljust(widest), colours.strong if worst else colours.dim)
        _bar(line, outlook, pp, max(8, cells), top, colours)
        line.add(size(ranks[pp].total).rjust(NUMBERS), colours.strong if worst else colours.text)
        line.add("  measured ", colours.dim).add(_measured(measured.get(pp)), colours.text)
        if with_device:
            one = measured.get(pp)
            text = format.MISSING if one is None or one.device is None else size(one.device)
            line.add("  device ", colours.dim).add(text.rjust(NUMBERS), colours.text)
        lines.append(line)
    if rest := len(ranks) - len(shown):
        most = max(ranks[pp].total for pp in order[len(shown) :])
        lines.append(
            StripLine().add(f"+{rest} pipeline ranks, each at most {size(most).strip()}", colours.faint)
        )
    return lines


def _measured(one: RankMemory | None) -> str:
    return (format.MISSING if one is None or one.step is None else size(one.step)).rjust(NUMBERS)


def _bar(line: StripLine, outlook: "Outlook", pp: int, cells: int, top: float, colours: Palette) -> None:
    """Add the bar of a pipeline rank: its memory components as segments with their letters, the free memory, and a mark
    at the device's limit."""
    parts = outlook.memory.ranks[pp].components()
    limit = None if not outlook.capacity else min(cells - 1, round(outlook.capacity / top * cells))
    styles = _styles(colours)
    at, used = 0.0, 0
    text: list[tuple[str, Style]] = []
    for name, value in parts.items():
        at += value / top * cells
        wide = round(at) - used
        text += [(LETTERS[name], styles[name])] * wide
        used += wide
    text += [("░", colours.faint)] * (cells - used)
    over = outlook.capacity is not None and outlook.memory.ranks[pp].total > outlook.capacity
    if limit is not None:
        text[limit] = (LIMIT, colours.level[Level.BAD] if over else colours.strong)
    for letter, style in text[:cells]:
        line.add(letter, style)


def _styles(colours: Palette) -> dict[str, Style]:
    """The style of each memory component in the bars. Neighbouring components have different styles."""
    blocks = [*colours.forward, *colours.backward, *colours.weight]
    return {name: blocks[n % len(blocks)] for n, name in enumerate(NAMES)}


def _components(now: "Outlook", after: "Outlook | None", width: int, colours: Palette) -> list[StripLine]:
    """The memory components of the rank that needs the most memory, such as ``A activations  31.2 GiB``, with their
    sizes after the hypothetical changes. The components are arranged in columns."""
    here = now.memory.ranks[now.memory.worst_rank].components()
    there = after.memory.ranks[after.memory.worst_rank].components() if after else here
    names = [name for name in NAMES if here[name] or there[name]]
    wide = 2 + 20 + NUMBERS + (3 + NUMBERS if after else 0) + 2
    columns = max(1, min(3, width // wide))
    rows = -(-len(names) // columns)
    styles = _styles(colours)
    lines = [StripLine() for _ in range(rows)]
    for n, name in enumerate(names):
        line = lines[n % rows].pad_to(n // rows * wide, colours.text)
        line.add(LETTERS[name], styles[name]).add(f" {NAMES[name]:<20}", colours.dim)
        line.add(size(here[name]).rjust(NUMBERS), colours.text)
        if after:
            same = abs(there[name] - here[name]) < 0.005 * max(1.0, here[name])
            tone = (
                colours.faint
                if same
                else colours.level[Level.GOOD if there[name] < here[name] else Level.WARN]
            )
            line.add(" → ", colours.faint).add(size(there[name]).rjust(NUMBERS), tone)
    head = f"worst: pipeline rank {now.memory.worst_rank}" + (" · now → what-if" if after else "")
    return [rule(head, width, colours.dim, colours.line), *lines]


# --------------------------------------------------------------------------------------------- savings


def _saving(one: Alternative, now: "Outlook", width: int, colours: Palette) -> StripLine:
    """A line such as ``recompute full   33.0 GiB   -31.2 GiB   step +24.0 .. +31.0 %``. The value in force is
    marked."""
    line = StripLine().add(f"{one.setting} {format.knob(one.value)}".ljust(20), colours.text)
    found = one.outlook
    if found is None:
        return line.add(format.MISSING, colours.faint)
    line.add(size(found.memory.peak).rjust(NUMBERS - 1), colours.strong)
    if not found.changes:
        return line.add("  in force", colours.dim)
    by = found.memory.peak - now.memory.peak
    tone = colours.level[Level.GOOD] if by < 0 else colours.dim
    line.add(signed_size(by).rjust(NUMBERS), tone)
    if found.step_s and now.step_s:
        step = _change(now.step_s.likely, found.step_s.low, found.step_s.high, width - line.width)
        line.add(step, colours.text)
    if found.fits is False:
        line.add(f"  {Level.BAD.value} does not fit", colours.level[Level.BAD])
    return line


def _change(before: float, low: float, high: float, room: int) -> str:
    """The predicted change of the step time, with as many digits as fit in `room` cells; "" if not even the shortest
    form fits, because a truncated number would be misleading."""
    forms = (
        f"  {change_text(before, low, high)}",
        f"  {change_text(before, low, high, 0)}",
        f" {change_text(before, low, high, 0).replace(' .. ', '..')}",
        f"  ×{low / before:.1f} .. {high / before:.1f}",
        f" ×{low / before:.1f}..{high / before:.0f}",
    )
    return next((text for text in forms if len(text) <= room), "")
