"""The what-if panel: the run's settings with hypothetical values, and the planner's prediction for all these values
together."""

from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual.binding import Binding

from agents.protocol import Previewed, Value
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.diagnosis.evidence import trusted
from cockpit.data.quantities import label_and_format
from cockpit.data.sources.source import Source
from cockpit.data.store import Store, Topic
from cockpit.knobs.edits import same
from cockpit.knobs.plan.asked import AskedWhatIf
from cockpit.knobs.plan.effect import estimates, measured_memory, sent_bytes
from cockpit.knobs.plan.model import WhatIf, live_knob
from cockpit.knobs.plan.settings import Setting, overrides
from cockpit.knobs.plan.worker import Answer
from cockpit.tui.drawing.strips import StripLine, paragraph, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import PLAN, PLAN_KEYS
from cockpit.tui.widgets.board.estimates import estimate_lines
from cockpit.tui.widgets.board.rows import knob_rows
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.plan.parts import COMPUTING, above_peak, verdict, without_plan
from engine.config.layout import Layout

if TYPE_CHECKING:
    from cockpit.knobs.plan.outlook import Outlook

NAME = 18  # columns
VALUE = 20
LEAST_EFFECT = 11  # lines that are reserved for the effect before those for settings
LIVE, RESTART = "live", "restart"


class WhatIfPanel(Panel):
    """The panel with a list of settings, one per row, and the effect of the hypothetical values below the list."""

    TOPICS = frozenset({Topic.BOARD, Topic.GRID, Topic.CURVES})
    TITLE = "What-if"
    BINDINGS: ClassVar[list[Binding]] = PLAN_KEYS  # type: ignore[assignment]
    ACTIONS = PLAN
    EVERY = 2
    HELP = (
        "↑ ↓ choose a setting, and ← → choose a hypothetical value. Only values that make a legal layout are offered. "
        "Nothing is sent to the run. The planner predicts the combined effect of all hypothetical values: first an "
        "interval, then the likely value in brackets. `live` means that the knob board can change the setting while "
        "the run trains; enter copies the values to the board as edits, and you propose them there. `restart` means "
        "that the setting is a key of the layout; enter shows the arguments of `engine run`. The number of ranks and "
        "the global batch stay as they are: dp_shard is adjusted to the other axes, and micro_batches to the nearest "
        "legal number. Times are the planner's, fitted to the steps of this run; where ranks share cores, times are "
        "not known. `x` forgets all hypothetical values."
    )

    def __init__(self, model: WhatIf, source: Source) -> None:
        super().__init__("what-if")
        self.model = model
        self.asked = AskedWhatIf(source)  # the what-if of a run without a layout
        self.notice = ""  # feedback on the last key

    def choice(self) -> object:
        return self.model.version(), self.asked.version(), self.notice

    def update_from(self, store: Store) -> None:
        if self.is_on_screen and self._is_asked(store):
            self.asked.update(store)
        super().update_from(store)

    def _is_asked(self, store: Store) -> bool:
        """Whether the predictions come from the run instead of the planner, because the run's layout is not available
        here but the run answers preview queries."""
        self.model.update(store)
        return isinstance(self.model.layout(), Answer) and self.asked.answers(store)

    def title(self, store: Store) -> str:
        if self._is_asked(store):
            return "What-if · previews of the run"
        count = len(self.model.changes)
        return f"What-if · {count} change{'s' * (count != 1)} · planned" if count else "What-if · planned"

    def subtitle(self, store: Store) -> str:
        if self._is_asked(store):
            return "a preview changes nothing"
        if self.model.worker.busy:
            return COMPUTING
        return "" if isinstance(self.model.layout(), Answer) else "nothing is sent to the run"

    # -------------------------------------------------------------------------------------------- keys

    @property
    def _changed(self) -> WhatIf | AskedWhatIf:
        return self.asked if self._is_asked(self._store) else self.model

    def live(self, store: Store) -> dict[str, Value]:
        """The hypothetical values that the run's knob board would accept now."""
        return self.asked.changes if self._is_asked(store) else self.model.live(store)

    def action_move(self, by: int) -> None:
        with self._store.lock:
            self.notice = ""
            self._changed.move(by)
        self.redraw()

    def action_turn(self, by: int) -> None:
        with self._store.lock:
            self.notice = ""
            self._changed.turn(by)
        self.redraw()

    def action_reset(self) -> None:
        with self._store.lock:
            self.notice = ""
            self._changed.reset()
        self.redraw()

    # ------------------------------------------------------------------------------------------ drawing

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        model = self.model
        model.update(store)
        free = 0 if self._is_asked(store) else height  # the previews of the run follow
        if missing := without_plan(model, width, free, colours):
            return missing + self._asked_lines(store, width, height - len(missing), colours)
        rows = model.rows()
        room = max(3, min(len(rows), height - LEAST_EFFECT))
        lines = self._rows(rows, store, room, width, colours)
        lines += self._note(width, colours)
        return lines + self._effect(store, width, height - len(lines), colours)

    def _asked_lines(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        """Lines for a run without a layout: its knobs, and the preview that the run computes for the hypothetical
        values."""
        if not self._is_asked(store):
            return []
        asked = self.asked
        room = max(2, min(len(asked.rows), height - LEAST_EFFECT))
        cursor = min(asked.edits.row, len(asked.rows) - 1)
        lines = [StripLine(), *knob_rows(asked.rows, cursor, asked.edits, room, width, colours)]
        lines.append(rule("Preview by the run", width, colours.text, colours.line))
        if not asked.changes:
            return [*lines, StripLine().add("  ← → choose a value", colours.dim)]
        if asked.preview.answer is None:
            return [*lines, StripLine().add(f"  {format.MISSING} {asked.preview.status}", colours.faint)]
        return lines + estimate_lines(
            asked.preview.answer, width, height - len(lines), colours, trusted(store)
        )

    def _rows(
        self, rows: list[Setting], store: Store, room: int, width: int, colours: Palette
    ) -> list[StripLine]:
        cursor = min(self.model.row, len(rows) - 1)
        top = max(0, min(cursor - room // 2, len(rows) - room))
        lines = []
        for n, setting in list(enumerate(rows))[top : top + room]:
            more = "↑ " if n == top > 0 else "↓ " if n == top + room - 1 < len(rows) - 1 else "  "
            lines.append(self._row(setting, n == cursor, more, store, width, colours))
        return lines

    def _row(
        self, setting: Setting, here: bool, more: str, store: Store, width: int, colours: Palette
    ) -> StripLine:
        """The line of one setting, such as ``▌ micro_batches  4 → 8   2 4 8 16   live``."""
        now, chosen = self.model.value(setting)
        line = StripLine().add("▌ " if here else more, colours.accent if here else colours.faint)
        line.add(setting.name, colours.strong if here else colours.text).pad_to(NAME, colours.text)
        if same(now, chosen):
            follow = self._follows().get(setting.name)
            line.add(self._value(setting, now), colours.strong if here else colours.text)
            line.add(f" → {format.knob(follow[1])} follows" if follow else "", colours.dim)
        else:
            line.add(f"{self._value(setting, now)} → ", colours.dim)
            line.add(f" {format.knob(chosen)} ", colours.cursor)
        line.pad_to(NAME + VALUE, colours.text)
        word = LIVE if live_knob(store, setting) else RESTART
        room = width - NAME - VALUE - len(RESTART) - 2
        if here and room > 8:
            legal = " ".join(format.knob(value) for value in self.model.values(setting))
            line.add(legal if len(legal) <= room else f"{legal[: room - 1]}…", colours.dim)
        line.pad_to(width - len(RESTART) - 1, colours.text)
        return line.add(f" {word}", colours.dim if word == LIVE else colours.faint)

    def _value(self, setting: Setting, value: Value) -> str:
        if setting.name == "machine" and value is None:
            basis = self.model.basis()
            return basis.hardware.name if basis else format.MISSING
        return format.knob(value)

    def _follows(self) -> dict[str, tuple[Value, Value]]:
        answer = self.model.outlook(self.model.changes) if self.model.changes else None
        return answer.value.follows if answer and answer.value else {}

    def _note(self, width: int, colours: Palette) -> list[StripLine]:
        """Feedback on the last key press or, if there is none, an explanation of the setting under the cursor."""
        if self.notice:
            return paragraph(self.notice, width, colours.accent, 2)
        setting = self.model.setting
        return paragraph(setting.about, width, colours.dim, 2) if setting else [StripLine()]

    def _effect(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        now = self.model.outlook({})
        after = self.model.outlook(self.model.changes) if self.model.changes else now
        for answer in (now, after):
            if answer is None:
                return [StripLine().add(f"  {format.MISSING} {COMPUTING}", colours.faint)]
            if answer.refusal:
                bad = colours.level[Level.BAD]
                return paragraph(f"{Level.BAD.value} not legal: {answer.refusal}", width, bad, 2, hanging=4)
        assert now and after
        if not self.model.changes:
            lines = _measured_lines(store, now.value, width, height, colours)
            return [*lines[:2], *self._doubt(now, width, colours), *lines[2:]][:height]
        return self._changed_lines(store, now, after, width, height, colours)

    def _changed_lines(
        self, store: Store, now: Answer, after: Answer, width: int, height: int, colours: Palette
    ) -> list[StripLine]:
        old = "" if now.fresh and after.fresh else f" · {COMPUTING} with newer steps"
        lines = [rule(f"now → what-if · planned{old}", width, colours.text, colours.line)]
        lines.append(StripLine().add("  ", colours.text).extend(verdict(after.value, width - 2, colours)))
        lines += self._doubt(now, width, colours)
        found = estimates(store, now.value, after.value)
        answer = Previewed("", {}, 0, estimates=found)
        return lines + estimate_lines(answer, width, height - len(lines), colours)

    def _doubt(self, now: Answer, width: int, colours: Palette) -> list[StripLine]:
        basis = self.model.basis()
        return above_peak(now.value, basis.hardware.name, width, colours) if basis else []

    def arguments(self) -> str:
        """The arguments of `engine run` that set the hypothetical values, and all settings that must change together
        with these."""
        now, after = self.model.layout(), self.model.outlook(self.model.changes)
        if not isinstance(now, Layout) or after is None:
            return COMPUTING
        return " ".join(overrides(now, after.value.layout)) if after.value else after.refusal


def _measured_lines(
    store: Store, outlook: "Outlook", width: int, height: int, colours: Palette
) -> list[StripLine]:
    """Lines about the run with its current settings: measured values beside the planner's predictions."""
    rows = _measured_rows(store, outlook)
    lines = [
        rule("the run as it is: measured · planned", width, colours.dim, colours.line),
        StripLine().add("  ", colours.text).extend(verdict(outlook, width - 2, colours)),
    ]
    below: dict[str, list[str]] = {}  # notes that do not fit beside their numbers, with their quantities
    for quantity, measured, planned, note in rows:
        label, written = label_and_format(quantity)
        line = StripLine().add(f"  {label:<13}", colours.text)
        for value, style in ((measured, colours.strong), (planned, colours.text)):
            number, unit = (format.MISSING, "") if value is None else written(value)
            line.add(number.rjust(8), style).add(f" {unit:<4}", colours.dim)
        beside = f"  {note}" if note else ""
        if line.width + cell_len(beside) > width:
            below.setdefault(note, []).append(label)
            beside = ""
        lines.append(line.add(beside, colours.dim))
    for note, labels in sorted(below.items(), key=lambda one: -len(one[1])):
        lines += paragraph(f"{', '.join(labels)}: {note}", width, colours.dim, 2, hanging=4)
    return lines[:height]


def _measured_rows(store: Store, outlook: "Outlook") -> list[tuple[str, float | None, float | None, str]]:
    summary, span = store.summary, outlook.step_s
    rows: list[tuple[str, float | None, float | None, str]] = []
    step = summary.step_ms if summary else None
    rows.append(("step_ms", step, 1e3 * span.likely if span else None, outlook.source or outlook.why))
    if (summary and summary.mfu is not None) or outlook.mfu:
        rows.append(("mfu", summary.mfu if summary else None, outlook.mfu, _bound_by(outlook)))
    if outlook.bound is not None:
        bubble = outlook.bound if outlook.bubble is None else outlook.bubble
        note = "planned: idle share of the schedule" if outlook.bubble is None else ""
        rows.append(("bubble", summary.bubble if summary else None, bubble, note))
    memory = measured_memory(store)
    worst = max((one.step or 0 for one in memory.values()), default=None)
    rows.append(
        ("peak_bytes", worst, outlook.memory.peak, f"of pipeline rank {outlook.memory.worst_rank}, the worst")
    )
    sent = sent_bytes(store)
    for axis, planned in outlook.bytes.items():
        if planned or sent.get(axis):
            rows.append((f"{axis}_bytes", sent.get(axis), planned, "sent by rank 0 in a step"))
    return rows


def _bound_by(outlook: "Outlook") -> str:
    return f"{outlook.bound_by} takes most of the step" if outlook.bound_by else ""
