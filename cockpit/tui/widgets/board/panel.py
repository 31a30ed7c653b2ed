"""The knob board as a panel: knobs, actions, the preview or trial, and the newest changes."""

from collections.abc import Collection

from agents.protocol import Board, KnobState, Value
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.diagnosis.evidence import trusted
from cockpit.data.diagnosis.status import simulated_text, status_word
from cockpit.data.link import LinkState
from cockpit.data.sources.source import viewer_text
from cockpit.data.store import Store, Topic
from cockpit.knobs import values
from cockpit.knobs.controller import BoardController, rows, run_ended
from cockpit.tui.drawing.strips import StripLine, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.dialog_bindings import BOARD
from cockpit.tui.widgets.board.estimates import estimate_lines
from cockpit.tui.widgets.board.outcomes import TRIAL, newest_lines, progress, trial_lines
from cockpit.tui.widgets.board.rows import about_height, about_lines, action_strip, knob_rows, strip_height
from cockpit.tui.widgets.panel import Panel

# PARTS: heights of the fixed parts of the board. CUTS: on a small screen, parts shrink in this order to this height
# until all fit. No height depends on the edits, so that rows do not move while the user edits.
PARTS = {"gap": 1, "foot": 1, "below": 8}
CUTS = (
    ("below", 6),
    ("gap", 0),
    ("about", 2),
    ("below", 4),
    ("knobs", 7),
    ("about", 1),
    ("knobs", 3),
    ("below", 0),
    ("about", 0),
    ("actions", 0),
)
UNSENT = "no message from the hub: it gets the request when it is back"


class KnobTable(Panel):
    """The panel of the knob board. Below the knobs, the panel shows a preview of the edits and, if there is room, the
    newest changes."""

    TOPICS = frozenset({Topic.BOARD, Topic.GRID, Topic.CURVES, Topic.EVENTS})
    NATURAL = True
    TITLE = "Knob board"
    ACTIONS = BOARD
    HELP = (
        "↑ ↓ choose a knob or an action. ← → choose a legal value; a value can also be typed (`none` for no limit). "
        "The board requests a preview of the edits from the run, with an interval for each quantity and its source. "
        "enter proposes all edits: all ranks switch at one step boundary, or none does. A trial measures one knob "
        "before and after the change, and reverts the change unless the run is clearly faster; every operator sees the "
        "trial and can keep its value or end it. An action, such as save, has no value: enter requests it. An action "
        "that ends the run asks for confirmation. If someone else has changed the board since the first edit, enter "
        "first shows that change, and a second enter proposes the edits anyway. Under an applied change, `effect` "
        "shows the values before and after it, and the predicted value. u undoes the newest change, on every screen. "
        "esc discards the edits."
    )

    def __init__(self, controller: BoardController) -> None:
        super().__init__("board")
        self.controller = controller

    def choice(self) -> object:
        return self.controller.version(), stale_text(self._store)

    # -------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        board, stale = store.state.board, stale_text(store)
        title = f"Knobs · revision {board.revision}" if board else "Knobs"
        return f"{title} · {stale}" if stale else title

    def subtitle(self, store: Store) -> str:
        role = "OPERATOR" if self.controller.source.operator else "VIEWER"
        return f"{simulated_text(store)} · {role}" if store.simulated else role

    def natural_height(self, store: Store) -> int:
        trial = TRIAL if self.controller.trial_id in store.state.trials else 0
        return max(1, sum(needed_lines(store, self.content_size.width).values())) + trial

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        board = store.state.board
        if not board or not board.knobs:
            return [StripLine().add(f"{format.MISSING} the run has not sent its knobs yet", colours.faint)]
        edits, here = self.controller.edits, rows(store)
        at = min(edits.row, len(here) - 1)
        held, actions = values.value_knobs(board), values.actions(board)
        trial = store.state.trials.get(self.controller.trial_id)
        part = fit_lines(needed_lines(store, width), height - (TRIAL if trial else 0))
        lines = knob_rows(held, at, edits, part["knobs"], width, colours)
        lines += action_strip(actions, at - len(held), edits, width, colours)[: part["actions"]]
        lines += [StripLine()] * part["gap"]
        lines.append(self._request_line(store, board, width, colours))
        # On a small screen a preview replaces the explanation.
        below = part["about"] + part["below"]
        reserved = part["about"] if edits.pending(here) else min(below, about_height(here, held, width))
        lines += _about(about_lines(here[at], held, width), reserved, colours)
        if trial:
            lines += trial_lines(trial, width, colours)
        return lines + self._below(store, board, below - reserved, width, colours)

    def _request_line(self, store: Store, board: Board, width: int, colours: Palette) -> StripLine:
        """The line with a message for the user, else with the pending edits, else with the state of the last request
        that this cockpit sent. If there is none of these: the end of the run, why a viewer cannot change knobs, or a
        hint about the next key."""
        controller, line = self.controller, StripLine().add("  ", colours.text)
        if message := controller.message:
            return line.add(f"{message.level.value} {message.text}", colours.level[message.level])
        if pending_edits := controller.edits.pending(rows(store)):
            return self._pending_line(line, store, board, pending_edits, width, colours)
        if controller.decision:
            return line.add(
                f"sent: {'keep the value' if controller.decision.keep else 'end the trial'}", colours.dim
            )
        if controller.request_id in store.denied:
            return line.add(f"{Level.BAD.value} refused ", colours.level[Level.BAD]).add(
                store.denied[controller.request_id], colours.text
            )
        trial = store.state.trials.get(controller.request_id)
        if controller.request_id and trial is None:
            if controller.request_id not in store.state.commands and stale_text(store):
                line.add(f"{Level.WARN.value} {UNSENT}", colours.level[Level.WARN])
                return line
            return progress(store.state.commands.get(controller.request_id), colours)
        if trial and trial.state == "failed" and controller.trial_id != trial.id:
            line.add(f"{Level.BAD.value} no trial: ", colours.level[Level.BAD])
            return line.add(format.clean(trial.why), colours.text)
        if run_ended(store):
            return line.add("the run is over: these are the last values", colours.dim)
        if not controller.source.operator:
            return line.add(viewer_text(controller.source), colours.dim)
        return line.add(_next_keys(controller.edits.selected(rows(store))), colours.dim)

    def _pending_line(
        self,
        line: StripLine,
        store: Store,
        board: Board,
        pending_edits: dict[str, Value],
        width: int,
        colours: Palette,
    ) -> StripLine:
        changing = [knob for knob in board.knobs if knob.name in pending_edits]
        words = ", ".join(values.change_text(knob, pending_edits[knob.name]) for knob in changing)
        does = "enter proposes " if self.controller.source.operator else "preview only: "
        line.add(does, colours.dim).add(words, colours.strong)
        if held := [knob for knob in changing if not knob.action]:
            neutral = all(knob.loss_neutral for knob in held)
            line.add(f" · {values.NEUTRAL[neutral]}", colours.dim if neutral else colours.level[Level.WARN])
        tries = f" · or try it for {values.TRIAL_STEPS} steps"
        one = len(changing) == len(held) == 1
        may = self.controller.source.operator and one and not store.trial
        return line.add(tries if may and line.width + len(tries) <= width else "", colours.dim)

    def _below(
        self, store: Store, board: Board, height: int, width: int, colours: Palette
    ) -> list[StripLine]:
        """The preview of the edits, if there are any; then the newest changes, if there is room."""
        pending_edits = self.controller.edits.pending(rows(store))
        if not pending_edits or height < 2:
            return newest_lines(store, height, width, colours)
        preview = self.controller.preview
        if preview.answer:
            lines = estimate_lines(preview.answer, width, height - 1, colours, trusted(store))
        else:
            lines = [StripLine().add(f"  {format.MISSING} {preview.status}", colours.faint)]
        head = rule(self._preview_heading(board, pending_edits), width, colours.text, colours.line)
        room = height - 1 - len(lines)
        return [head, *lines, *newest_lines(store, room, width, colours)]

    def _preview_heading(self, board: Board, pending_edits: Collection[str]) -> str:
        """The heading of a preview. If the run has answered that the changes are legal, the heading says whether they
        are loss-neutral."""
        answer = self.controller.preview.answer
        held = any(knob.name in pending_edits for knob in values.value_knobs(board))
        neutral = answer.loss_neutral if answer and not answer.why and held else None
        return "Preview" + ("" if neutral is None else f" · {values.NEUTRAL[neutral]}")


def stale_text(store: Store) -> str:
    """A warning such as ``STALE 12 s`` while the hub is silent, because the board covers the status lines; otherwise
    ""."""
    return status_word(store)[0] if store.link is LinkState.STALE else ""


def _about(text: list[str], height: int, colours: Palette) -> list[StripLine]:
    """An explanation in exactly `height` lines; longer text is cut with `…`."""
    if len(text) > height > 0:
        text = [*text[: height - 1], f"{text[height - 1]}…"]
    lines = [StripLine().add(f"  {line}", colours.dim) for line in text[:height]]
    return lines + [StripLine()] * (height - len(lines))


def _next_keys(knob: KnobState) -> str:
    """A hint about the keys that apply to the row under the cursor."""
    if knob.ends:
        return "enter ends the run after a confirmation"
    if values.only_value(knob) is not None:
        return "enter requests it"
    return f"← → choose a legal value, or type one · enter {'requests it' if knob.action else 'proposes it'}"


def needed_lines(store: Store, width: int) -> dict[str, int]:
    """How many lines each section of the knob board needs: the knobs, the actions, the explanation of the selected row,
    and the sections of fixed height (`PARTS`)."""
    board = store.state.board
    return {
        "knobs": len(values.value_knobs(board)),
        "actions": strip_height(values.actions(board), width),
        "about": about_height(rows(store), values.value_knobs(board), width),
        **PARTS,
    }


def fit_lines(part: dict[str, int], height: int) -> dict[str, int]:
    """How many lines each section gets in a knob board of `height` lines, from the numbers that the sections need
    (`part`)."""
    part = dict(part)
    for name, least in CUTS:
        over = sum(part.values()) - height
        part[name] -= max(0, min(over, part[name] - least))
    part["below"] += max(0, height - sum(part.values()))
    return part
