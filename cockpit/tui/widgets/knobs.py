"""Panel with the knobs, their values and their legal values."""

from collections.abc import Sequence

from agents.protocol import KnobState
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.store import Store, Topic
from cockpit.knobs.values import actions, effect_text, legal_text, value_knobs, value_text
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel


class KnobSummary(Panel):
    """The panel with one row per knob. The last row lists the actions, and the knobs for which the panel has no row
    left."""

    TOPICS = frozenset({Topic.BOARD})
    TITLE = "Knobs"
    NATURAL = True
    HELP = (
        "The knobs that an operator can change during the run. A loss-neutral knob changes only speed and memory; a "
        "knob that changes the loss is labelled as such. A knob on trial shows the steps measured so far. `k` opens "
        "the knob board from any screen."
    )

    def __init__(self, selection: Selection, id: str = "knobs") -> None:
        super().__init__(id)
        self._selection = selection

    def choice(self) -> object:
        return self._selection.step

    def title(self, store: Store) -> str:
        board = store.state.board
        now = " · now" if self._selection.step is not None else ""
        return f"Knobs · revision {board.revision}{now}" if board else "Knobs"

    def subtitle(self, store: Store) -> str:
        return "k to change" if store.state.board and not store.playback_position else ""

    def natural_height(self, store: Store) -> int:
        board = store.state.board
        return max(1, len(value_knobs(board)) + (1 if actions(board) else 0))

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        board = store.state.board
        if not board:
            return [StripLine().add(f"{format.MISSING} the run has not sent its knobs yet", colours.faint)]
        shown, pressed = value_knobs(board), actions(board)
        name = max((len(knob.name) for knob in shown), default=0) + 1
        value = max((len(value_text(knob)) for knob in shown), default=0)
        legal = max(0, min(30, width - name - max(6, value) - 19))
        if len(shown) + (1 if pressed else 0) <= height:
            rows, rest = len(shown), []
        else:
            rows, rest = height - 1, shown[height - 1 :]
        lines = []
        for knob in shown[:rows]:
            line = StripLine().add(format.clean(knob.name).ljust(name), colours.dim)
            line.add(value_text(knob).rjust(max(6, value)), colours.strong).add("  ", colours.dim)
            text = legal_text(knob)
            line.add(text.ljust(legal) if len(text) <= legal else f"{text[: legal - 1]}…", colours.dim)
            if store.trial and knob.name in store.trial.changes:
                line.add(f" trial {store.trial.measured}/{store.trial.steps}", colours.level[Level.WARN])
            else:
                effect = colours.faint if knob.loss_neutral else colours.text
                line.add(f" {effect_text(knob)}", effect)
            lines.append(line)
        if rest:
            lines.append(_rest([*rest, *pressed], width, colours))
        elif pressed:
            lines.append(
                StripLine()
                .add("actions ".ljust(name), colours.faint)
                .add("  ".join(knob.name for knob in pressed), colours.dim)
            )
        return lines


def _rest(knobs: Sequence[KnobState], width: int, colours: Palette) -> StripLine:
    """The last row, such as ``+4  z_loss_coef 0  zero 2  pause  save``: the number of hidden knobs and actions, and
    their names."""
    line = StripLine().add(f"+{len(knobs)}", colours.text)
    for n, knob in enumerate(knobs):
        name, value = format.clean(knob.name), "" if knob.action else f" {value_text(knob)}"
        keep = 2 if n + 1 < len(knobs) else 0  # leaves a cell for the `…` that marks hidden names
        if line.width + len(name + value) + 2 + keep > width:
            return line.add(" …", colours.dim)
        line.add(f"  {name}", colours.dim).add(value, colours.strong)
    return line
