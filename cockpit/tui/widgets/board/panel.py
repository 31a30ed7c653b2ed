"""The knob board as a panel: the knobs, what one may do with them, and what became of what was done."""

from collections.abc import Collection

from agents.protocol import Board, KnobState, Value
from cockpit.data import format
from cockpit.data.diagnosis import Level
from cockpit.data.sources.source import viewer_text
from cockpit.data.store import Store, Topic
from cockpit.knobs import values
from cockpit.knobs.controller import BoardController, over, rows
from cockpit.tui.keys import BOARD
from cockpit.tui.strips import StripLine, rule
from cockpit.tui.theme import Palette
from cockpit.tui.widgets.board.estimates import estimate_lines
from cockpit.tui.widgets.board.outcomes import TRIAL, newest_lines, progress, trial_lines
from cockpit.tui.widgets.board.rows import about_height, about_lines, action_strip, knob_rows, strip_height
from cockpit.tui.widgets.panel import Panel

# Lines of each part of the board, beside the knobs, the actions, the explanation and a trial; and where there is no
# room for all of them, to what each is cut, in this order, until they fit. No part depends on what is marked: nothing
# moves under the eye.
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


class KnobTable(Panel):
    """The board itself. Below the knobs: what the marked changes would do, or else the newest changes."""

    TOPICS = frozenset({Topic.BOARD, Topic.GRID})
    NATURAL = True
    TITLE = "Knob board"
    ACTIONS = BOARD
    HELP = (
        "↑ ↓ choose a knob or an action, ← → a legal value, or type one (`none` for no limit). What the marked changes "
        "would do is asked of the run by itself: with what lies between, and where each number comes from. enter "
        "proposes all that is marked: the ranks switch at one step boundary, all or none. A trial measures one knob "
        "before and after and takes it back unless the run is clearly faster; whoever started it, it is shown, and can "
        "be kept or ended. An action, such as save, holds no value: enter asks the run to do it, and what ends the run "
        "is asked once more. esc drops what is marked."
    )

    def __init__(self, controller: BoardController) -> None:
        super().__init__("board")
        self.controller = controller

    def choice(self) -> object:
        return self.controller.version()

    # -------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        board = store.state.board
        return f"Knobs · revision {board.revision}" if board else "Knobs"

    def subtitle(self, store: Store) -> str:
        return "OPERATOR" if self.controller.source.operator else "VIEWER"

    def natural_height(self, store: Store) -> int:
        trial = TRIAL if self.controller.trial_id in store.state.trials else 0
        return max(1, sum(wanted(store, self.content_size.width).values())) + trial

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        board = store.state.board
        if not board or not board.knobs:
            return [StripLine().add(f"{format.MISSING} the run has not sent its knobs yet", colours.faint)]
        edits, here = self.controller.edits, rows(store)
        at = min(edits.row, len(here) - 1)
        held, actions = values.held(board), values.actions(board)
        trial = store.state.trials.get(self.controller.trial_id)
        part = shares(wanted(store, width), height - (TRIAL if trial else 0))
        lines = knob_rows(held, at, edits, part["knobs"], width, colours)
        lines += action_strip(actions, at - len(held), edits, width, colours)[: part["actions"]]
        lines += [StripLine()] * part["gap"]
        lines.append(self._foot(store, board, width, colours))
        # A preview takes the room that the explanation had where there is not enough for both.
        below = part["about"] + part["below"]
        reserved = part["about"] if edits.pending(here) else min(below, about_height(here, held, width))
        lines += _about(about_lines(here[at], held, width), reserved, colours)
        if trial:
            lines += trial_lines(trial, width, colours)
        return lines + self._below(store, board, below - reserved, width, colours)

    def _foot(self, store: Store, board: Board, width: int, colours: Palette) -> StripLine:
        """The one line that says what is going on, or what the next key would do."""
        controller, line = self.controller, StripLine().add("  ", colours.text)
        if message := controller.message:
            return line.add(f"{message.level.value} {message.text}", colours.level[message.level])
        if marked := controller.edits.pending(rows(store)):
            return self._marked(line, store, board, marked, width, colours)
        if controller.decision:
            return line.add(
                f"asked to {'keep it' if controller.decision.keep else 'end the trial'}", colours.dim
            )
        if controller.request_id in store.denied:
            return line.add(f"{Level.BAD.value} refused ", colours.level[Level.BAD]).add(
                store.denied[controller.request_id], colours.text
            )
        trial = store.state.trials.get(controller.request_id)
        if controller.request_id and trial is None:
            return progress(store.state.commands.get(controller.request_id), colours)
        if trial and trial.state == "failed" and controller.trial_id != trial.id:
            line.add(f"{Level.BAD.value} no trial ", colours.level[Level.BAD])
            return line.add(format.clean(trial.why), colours.text)
        if over(store):
            return line.add("the run is over: this is what it had at its end", colours.dim)
        if not controller.source.operator:
            return line.add(viewer_text(controller.source), colours.dim)
        return line.add(_next_keys(controller.edits.selected(rows(store))), colours.dim)

    def _marked(
        self,
        line: StripLine,
        store: Store,
        board: Board,
        marked: dict[str, Value],
        width: int,
        colours: Palette,
    ) -> StripLine:
        changing = [knob for knob in board.knobs if knob.name in marked]
        words = ", ".join(values.change_text(knob, marked[knob.name]) for knob in changing)
        does = "enter proposes " if self.controller.source.operator else "only looking at "
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
        """What the marked changes would do; with none marked, and where it leaves room, the newest changes."""
        marked = self.controller.edits.pending(rows(store))
        if not marked or height < 2:
            return newest_lines(store, height, width, colours)
        preview = self.controller.preview
        if preview.answer:
            lines = estimate_lines(preview.answer, width, height - 1, colours)
        else:
            lines = [StripLine().add(f"  {format.MISSING} {preview.status}", colours.faint)]
        head = rule(self._would(board, marked), width, colours.text, colours.faint)
        room = height - 1 - len(lines)
        return [head, *lines, *newest_lines(store, room, width, colours)]

    def _would(self, board: Board, marked: Collection[str]) -> str:
        """The heading of a preview; whether it changes the loss is the run's own word."""
        answer = self.controller.preview.answer
        held = any(knob.name in marked for knob in values.held(board))
        neutral = answer.loss_neutral if answer and not answer.why and held else None
        return "What it would do" + ("" if neutral is None else f" · {values.NEUTRAL[neutral]}")


def _about(text: list[str], height: int, colours: Palette) -> list[StripLine]:
    """An explanation in just `height` lines; `…` tells that there is more of it."""
    if len(text) > height > 0:
        text = [*text[: height - 1], f"{text[height - 1]}…"]
    lines = [StripLine().add(f"  {line}", colours.dim) for line in text[:height]]
    return lines + [StripLine()] * (height - len(lines))


def _next_keys(knob: KnobState) -> str:
    """What may be done with the row that has the cursor."""
    if knob.ends:
        return "enter ends the run, and asks once more"
    if values.only(knob) is not None:
        return "enter asks the run to do it"
    return f"← → a legal value, or type one · enter {'asks the run to do it' if knob.action else 'proposes'}"


def wanted(store: Store, width: int) -> dict[str, int]:
    """Lines of each part, were there room for all."""
    board = store.state.board
    return {
        "knobs": len(values.held(board)),
        "actions": strip_height(values.actions(board), width),
        "about": about_height(rows(store), values.held(board), width),
        **PARTS,
    }


def shares(part: dict[str, int], height: int) -> dict[str, int]:
    """Of each part, its lines in `height` lines."""
    part = dict(part)
    for name, least in CUTS:
        over = sum(part.values()) - height
        part[name] -= max(0, min(over, part[name] - least))
    part["below"] += max(0, height - sum(part.values()))
    return part
