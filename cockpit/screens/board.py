"""The knob board: choose values, see what they mean, propose them, and watch the ranks take them."""

import textwrap
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer

from agents.wire import Board, CommandState, KnobState, Value
from cockpit import format, knobs
from cockpit.actions import BOARD_KEYS
from cockpit.feed import Feed, ViewerError
from cockpit.lines import Line, bar
from cockpit.store import Store, Topic, changes_text
from cockpit.theme import Palette
from cockpit.verdict import Level
from cockpit.widgets.panel import Panel

HISTORY = 4
ABOUT = 2  # lines; always as many, so that nothing below moves
TYPED = 24  # longest value that may be typed
_OUTCOME = {
    "accepted": Level.NOTE,
    "applied": Level.GOOD,
    "rejected": Level.BAD,
    "expired": Level.WARN,
    "rolled_back": Level.WARN,
}


class KnobTable(Panel):
    """The board itself."""

    TOPICS = frozenset({Topic.BOARD})
    NATURAL = True
    HELP = (
        "↑ ↓ choose a knob, ← → a legal value, or type one (`none` for no limit). Marked changes are proposed "
        "together with enter: the ranks switch at one step boundary, all or none. esc drops what is marked. "
        "An action, such as save, holds no value: enter on it asks for it."
    )

    def __init__(self, feed: Feed) -> None:
        super().__init__("board")
        self._feed = feed
        self.row = 0
        self.staged: dict[str, Value] = {}
        self.base: int | None = (
            None  # the revision seen at the first mark: a faster operator refuses this one
        )
        self.typed = ""
        self.said = ""
        self.sent: str | None = None

    def choice(self) -> object:
        return self.row, tuple(self.staged.items()), self.typed, self.said, self.sent

    # ------------------------------------------------------------------------------------- choosing

    @property
    def _rows(self) -> list[KnobState]:
        with self._store.lock:
            board = self._store.state.board
            return board.knobs if board else []

    @property
    def _revision(self) -> int | None:
        with self._store.lock:
            board = self._store.state.board
            return board.revision if board else None

    def _may(self) -> bool:
        if not self._feed.operator:
            self.said = viewer_text(self._feed)
        return self._feed.operator

    def move(self, by: int) -> None:
        if self._take() and self._rows:
            self.row = (self.row + by) % len(self._rows)
        self.again()

    def turn(self, by: int) -> None:
        if self._may() and self._rows:
            knob = self._rows[self.row]
            self.typed = self.said = ""
            self._stage(knob, knobs.step(knob, self.staged.get(knob.name, knob.value), by))
        self.again()

    def type(self, letter: str) -> None:
        if self._may() and len(self.typed) < TYPED:
            self.typed, self.said = self.typed + letter, ""
        self.again()

    def rub_out(self) -> None:
        self.typed = self.typed[:-1]
        self.again()

    def drop(self) -> bool:
        """Forget what is typed and marked; False if there was nothing."""
        had = bool(self.typed or self.staged or self.said)
        self.typed, self.said = "", ""
        self.staged.clear()
        self.again()
        return had

    def _take(self) -> bool:
        """What was typed becomes a marked change; False, and a sentence, if it is not legal."""
        if not self.typed:
            return True
        knob = self._rows[self.row]
        value = knobs.fit(knob, knobs.parse(self.typed))
        refusal = knob.refusal(value)
        if refusal:
            self.said = refusal
            return False
        self._stage(knob, value)
        self.typed = ""
        return True

    def _meant(self) -> dict[str, Value]:
        """What enter would propose: the marked changes, and what is being typed if it is legal so far."""
        if not self.typed or not self._rows:
            return self.staged
        knob = self._rows[min(self.row, len(self._rows) - 1)]
        value = knobs.fit(knob, knobs.parse(self.typed))
        return self.staged if knob.refusal(value) else {**self.staged, knob.name: value}

    def _stage(self, knob: KnobState, value: Value) -> None:
        if not self.staged:
            self.base = self._revision
        if value == knob.value and type(value) is type(knob.value):
            self.staged.pop(knob.name, None)
        else:
            self.staged[knob.name] = value

    def propose(self) -> None:
        if self._may() and self._take():
            if not self.staged and self._rows and (do := knobs.only(self._rows[self.row])) is not None:
                self._stage(self._rows[self.row], do)
            if not self.staged:
                self.said = "nothing is marked: choose a value with ← → or type one"
            else:
                try:
                    self.sent = self._feed.propose(self.staged, self.base)
                    self.staged, self.said = {}, ""
                except ViewerError:
                    self.said = viewer_text(self._feed)
        self.again()

    # -------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        board = store.state.board
        return f"Knobs · revision {board.revision}" if board else "Knobs"

    def subtitle(self, store: Store) -> str:
        return "OPERATOR" if self._feed.operator else "VIEWER"

    def natural_height(self, store: Store) -> int:
        board = store.state.board
        done = min(HISTORY, len(store.state.commands))
        return (len(board.knobs) if board else 1) + 5 + ABOUT + (done + 1 if done else 0)

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[Line]:
        board = store.state.board
        if not board:
            return [Line().add(f"{format.MISSING} the run has not sent its knobs yet", colours.faint)]
        lines = [Line(), *self._table(board, width, colours), Line()]
        chosen = board.knobs[min(self.row, len(board.knobs) - 1)]
        about = textwrap.wrap(format.clean(chosen.about), max(20, width - 4))[:ABOUT]
        lines += [Line().add(f"  {line}", colours.dim) for line in about]
        lines += [Line()] * (ABOUT - len(about) + 1)
        lines.append(self._foot(store, board, colours))
        history = sorted(store.state.commands.values(), key=lambda command: command.time_s)[-HISTORY:]
        if history:
            lines.append(Line())
            lines += [_outcome(command, colours) for command in reversed(history)]
        return lines

    def _table(self, board: Board, width: int, colours: Palette) -> list[Line]:
        name = max((len(knob.name) for knob in board.knobs), default=0) + 2
        lines = []
        for i, knob in enumerate(board.knobs):
            here = i == min(self.row, len(board.knobs) - 1)
            line = Line().add("▌ " if here else "  ", colours.accent)
            line.add(format.clean(knob.name).ljust(name), colours.strong if here else colours.text)
            value = knobs.value_text(knob)
            if here and self.typed:
                line.add(f"{value} → ", colours.dim).add(f"{self.typed}▏", colours.cursor)
            elif knob.name in self.staged:
                line.add(f"{value} → ", colours.dim).add(
                    f" {format.knob(self.staged[knob.name])} ", colours.cursor
                )
            else:
                line.add(value, colours.strong if here else colours.text)
            line.pad_to(name + 26, colours.text)
            room = max(0, width - name - 26 - 20)
            line.add(knobs.legal_text(knob)[:room].ljust(room), colours.dim)
            neutral = colours.dim if knob.loss_neutral else colours.level[Level.WARN]
            line.add(f" {knobs.NEUTRAL[knob.loss_neutral]}", neutral if here else colours.dim)
            lines.append(line)
        return lines

    def _foot(self, store: Store, board: Board, colours: Palette) -> Line:
        """The one line that says what is going on."""
        line = Line().add("  ", colours.text)
        if self.said:
            return line.add(f"{Level.WARN.value} {self.said}", colours.level[Level.WARN])
        by_name = {knob.name: knob for knob in board.knobs}
        marked = {name: to for name, to in self._meant().items() if name in by_name}
        if marked:
            words = ", ".join(knobs.change_text(by_name[name], to) for name, to in marked.items())
            neutral = all(by_name[name].loss_neutral for name in marked)
            line.add("enter proposes ", colours.dim).add(words, colours.strong)
            return line.add(
                f" · {knobs.NEUTRAL[neutral]}", colours.dim if neutral else colours.level[Level.WARN]
            )
        if self.sent:
            command = store.state.commands.get(self.sent)
            return progress(command, colours)
        if not self._feed.operator:
            return line.add(viewer_text(self._feed), colours.dim)
        return line.add("← → a legal value, or type one · enter proposes", colours.dim)


def progress(command: CommandState | None, colours: Palette) -> Line:
    """How far a proposal has come: sent, accepted, applied n/n, or refused and why."""
    line = Line().add("  ", colours.text)
    if command is None:
        return line.add("sent · waiting for the hub", colours.dim)
    level = _OUTCOME[command.state]
    line.add(f"{level.value} {command.state} ", colours.level[level])
    if command.state in ("rejected", "expired", "rolled_back"):
        return line.add(format.clean(command.why), colours.text)
    share = command.acks / command.world if command.world else 0.0
    line.add(bar(share, 12).replace(" ", "░"), colours.accent)
    line.add(f" {command.acks:>{len(str(command.world))}}/{command.world}", colours.strong)
    at = (
        "waiting for a step boundary"
        if command.applied_step is None
        else f"at step {format.grouped(command.applied_step)}"
    )
    return line.add(f" {at} · revision {command.revision}", colours.dim)


def _outcome(command: CommandState, colours: Palette) -> Line:
    level = _OUTCOME[command.state]
    line = Line().add(f"  {level.value} ", colours.level[level])
    line.add(f"r{command.revision} ".ljust(5) if command.revision else "     ", colours.dim)
    line.add(changes_text(command), colours.text)
    if command.applied_step is not None:
        line.add(
            f" · {command.acks}/{command.world} at step {format.grouped(command.applied_step)}", colours.dim
        )
    elif command.why:
        line.add(f" · {format.clean(command.why)}", colours.dim)
    return line.add(f" · {format.clean(command.who)}" if command.who else "", colours.faint)


def viewer_text(feed: Feed) -> str:
    return f"this cockpit only watches · to operate: cockpit attach {feed.target} --operator"


class KnobBoard(ModalScreen[None]):
    """The board over whatever screen it was called from."""

    BINDINGS: ClassVar[list[Binding]] = BOARD_KEYS  # type: ignore[assignment]

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.table = KnobTable(feed)

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield self.table
        yield Footer(show_command_palette=False)

    def look(self, store: Store) -> None:
        self.table.look(store)

    def on_key(self, event: events.Key) -> None:
        if event.key == "backspace":
            self.table.rub_out()
        elif event.character and event.character.isprintable() and event.character != " ":
            self.table.type(event.character)
        else:
            return
        event.stop()

    def action_move(self, by: int) -> None:
        self.table.move(by)

    def action_turn(self, by: int) -> None:
        self.table.turn(by)

    def action_propose(self) -> None:
        self.table.propose()

    def action_close(self) -> None:
        if not self.table.drop():
            self.dismiss()
