"""The knob board as a panel: the knobs, what one may do with them, and what became of what was done."""

import textwrap
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from agents.wire import Board, Value
from cockpit import format, knobs
from cockpit.actions import BOARD
from cockpit.desk import Desk, rows
from cockpit.feed import Feed, viewer_text
from cockpit.lines import Line, rule
from cockpit.store import Store, Topic
from cockpit.theme import Palette
from cockpit.verdict import Level
from cockpit.widgets.estimates import estimate_lines
from cockpit.widgets.fates import TRIAL, newest_lines, progress, trial_lines
from cockpit.widgets.panel import Panel

Deed = ParamSpec("Deed")

VALUE = (19, 26)  # columns, in a narrow board and in a wide one
LEGAL = 32  # at most
EFFECT = 17
WIDE = 92
# Lines of each part of the board, beside the rows of knobs and a trial; and where there is no room for all of them,
# to what each is cut, in this order, until they fit. No part depends on what is marked: nothing moves under the eye.
PARTS = {"gap": 1, "about": 2, "foot": 1, "below": 8}
CUTS = (
    ("about", 1),
    ("knobs", 10),
    ("below", 6),
    ("knobs", 7),
    ("gap", 0),
    ("below", 4),
    ("knobs", 3),
    ("about", 0),
)


class KnobTable(Panel):
    """The board itself. Below the knobs: what the marked changes would do, or else the newest changes."""

    TOPICS = frozenset({Topic.BOARD, Topic.GRID})
    NATURAL = True
    TITLE = "Knob board"
    ACTIONS = BOARD
    HELP = (
        "↑ ↓ choose a knob, ← → a legal value, or type one (`none` for no limit). What the marked changes would do is "
        "asked of the run by itself: with what lies between, and where each number comes from. enter proposes all that "
        "is marked: the ranks switch at one step boundary, all or none. A trial measures one knob before and after and "
        "takes it back unless the run is clearly faster; whoever started it, it is shown, and can be kept or ended. An "
        "action, such as save, holds no value: enter on it asks for it. esc drops what is marked."
    )

    def __init__(self, feed: Feed) -> None:
        super().__init__("board")
        self.desk = Desk(feed)

    def choice(self) -> object:
        return self.desk.state()

    def look(self, store: Store) -> None:
        self.desk.look(store)
        super().look(store)

    def do(
        self, deed: Callable[Concatenate[Store, Deed], object], *args: Deed.args, **kwargs: Deed.kwargs
    ) -> None:
        """A deed of the desk's, seen at once."""
        with self._store.lock:
            deed(self._store, *args, **kwargs)
            self.look(self._store)

    def drop(self) -> bool:
        """Forget what is typed, marked or said; False if there was nothing."""
        with self._store.lock:
            had = self.desk.drop(self._store)
            self.look(self._store)
        return had

    # -------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        board = store.state.board
        return f"Knobs · revision {board.revision}" if board else "Knobs"

    def subtitle(self, store: Store) -> str:
        return "OPERATOR" if self.desk.feed.operator else "VIEWER"

    def natural_height(self, store: Store) -> int:
        trial = TRIAL if self.desk.watched in store.state.trials else 0
        return max(1, len(rows(store))) + trial + sum(PARTS.values())

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[Line]:
        board = store.state.board
        if not board or not board.knobs:
            return [Line().add(f"{format.MISSING} the run has not sent its knobs yet", colours.faint)]
        trial = store.state.trials.get(self.desk.watched)
        part = shares(len(board.knobs), height - (TRIAL if trial else 0))
        chosen = self.desk.marks.chosen(board.knobs)
        about = textwrap.wrap(format.clean(chosen.about), max(20, width - 4))[: part["about"]]
        lines = self._table(board, part["knobs"], width, colours)
        lines += [Line()] * part["gap"]
        lines += [Line().add(f"  {line}", colours.dim) for line in about]
        lines += [Line()] * (part["about"] - len(about))
        lines.append(self._foot(store, board, width, colours))
        if trial:
            lines += trial_lines(trial, width, colours)
        return lines + self._below(store, board, part["below"], width, colours)

    def _table(self, board: Board, height: int, width: int, colours: Palette) -> list[Line]:
        """As many rows as there is room for, around the cursor; arrows tell that there are more."""
        marks = self.desk.marks
        at = min(marks.row, len(board.knobs) - 1)
        top = max(0, min(at - height // 2, len(board.knobs) - height))
        name = max(len(knob.name) for knob in board.knobs) + 2
        values = name + VALUE[width >= WIDE]
        room = max(0, min(LEGAL, width - values - EFFECT - 1))
        lines = []
        for i, knob in list(enumerate(board.knobs))[top : top + height]:
            here = i == at
            more = "↑ " if i == top > 0 else "↓ " if i == top + height - 1 < len(board.knobs) - 1 else "  "
            line = Line().add("▌ " if here else more, colours.accent if here else colours.faint)
            line.add(format.clean(knob.name).ljust(name), colours.strong if here else colours.text)
            value = knobs.value_text(knob)
            if here and marks.typed:
                line.add(f"{value} → ", colours.dim).add(f"{marks.typed}▏", colours.cursor)
            elif knob.name in marks.values:
                line.add(f"{value} → ", colours.dim)
                line.add(f" {format.knob(marks.values[knob.name])} ", colours.cursor)
            else:
                line.add(value, colours.strong if here else colours.text)
            line.pad_to(values, colours.text)
            line.add(knobs.legal_text(knob)[:room].ljust(room), colours.dim)
            neutral = colours.dim if knob.loss_neutral else colours.level[Level.WARN]
            line.add(f" {knobs.NEUTRAL[knob.loss_neutral]}", neutral if here else colours.dim)
            lines.append(line)
        return lines

    def _foot(self, store: Store, board: Board, width: int, colours: Palette) -> Line:
        """The one line that says what is going on, or what the next key would do."""
        desk, line = self.desk, Line().add("  ", colours.text)
        if desk.said:
            return line.add(f"{desk.said.level.value} {desk.said.text}", colours.level[desk.said.level])
        if marked := desk.marks.meant(board.knobs):
            return self._marked(line, store, board, marked, width, colours)
        if desk.word:
            return line.add(f"asked to {'keep it' if desk.word.keep else 'end the trial'}", colours.dim)
        if desk.sent in store.denied:
            return line.add(f"{Level.BAD.value} refused ", colours.level[Level.BAD]).add(
                store.denied[desk.sent], colours.text
            )
        trial = store.state.trials.get(desk.sent)
        if desk.sent and trial is None:
            return progress(store.state.commands.get(desk.sent), colours)
        if trial and trial.state == "failed" and desk.watched != trial.id:
            line.add(f"{Level.BAD.value} no trial ", colours.level[Level.BAD])
            return line.add(format.clean(trial.why), colours.text)
        if not desk.feed.operator:
            return line.add(viewer_text(desk.feed), colours.dim)
        return line.add("← → a legal value, or type one · enter proposes", colours.dim)

    def _marked(
        self, line: Line, store: Store, board: Board, marked: dict[str, Value], width: int, colours: Palette
    ) -> Line:
        by_name = {knob.name: knob for knob in board.knobs}
        words = ", ".join(knobs.change_text(by_name[name], to) for name, to in marked.items())
        neutral = all(by_name[name].loss_neutral for name in marked)
        does = "enter proposes " if self.desk.feed.operator else "only looking at "
        line.add(does, colours.dim).add(words, colours.strong)
        line.add(f" · {knobs.NEUTRAL[neutral]}", colours.dim if neutral else colours.level[Level.WARN])
        tries = f" · or try it for {knobs.TRIAL_STEPS} steps"
        one = len(marked) == 1 and not by_name[next(iter(marked))].action
        may = self.desk.feed.operator and one and not store.trial
        return line.add(tries if may and line.width + len(tries) <= width else "", colours.dim)

    def _below(self, store: Store, board: Board, height: int, width: int, colours: Palette) -> list[Line]:
        """What the marked changes would do; with none marked, and where it leaves room, the newest changes."""
        marked = self.desk.marks.meant(board.knobs)
        if not marked or height < 2:
            return newest_lines(store, height, width, colours)
        asking = self.desk.asking
        if asking.answer:
            lines = estimate_lines(asking.answer, width, height - 1, colours)
        else:
            lines = [Line().add(f"  {format.MISSING} {asking.word}", colours.faint)]
        head = rule(self._would(), width, colours.text, colours.faint)
        room = height - 1 - len(lines)
        return [head, *lines, *newest_lines(store, room, width, colours)]

    def _would(self) -> str:
        """The heading of a preview; whether it changes the loss is the run's own word."""
        answer = self.desk.asking.answer
        neutral = answer.loss_neutral if answer and not answer.why else None
        return "What it would do" + ("" if neutral is None else f" · {knobs.NEUTRAL[neutral]}")


def shares(count: int, height: int) -> dict[str, int]:
    """Lines of each part of a board of `count` knobs, in `height` lines."""
    part = {"knobs": count, **PARTS}
    for name, least in CUTS:
        over = sum(part.values()) - height
        part[name] -= max(0, min(over, part[name] - least))
    part["below"] += max(0, height - sum(part.values()))
    return part
