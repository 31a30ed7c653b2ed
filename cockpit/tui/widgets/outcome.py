"""Panel with the final summary of a run that has ended."""

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.link import LinkState
from cockpit.data.run_folders.final_summary import final_summary, outcome_rows, title
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.log.listing import wrap
from cockpit.tui.widgets.panel import Panel

LABEL = 12  # columns


class OutcomePanel(Panel):
    """The panel with the outcome of a run: its steps, its time, its losses, and the effect of each knob change."""

    TOPICS = frozenset({Topic.RANKS, Topic.CURVES, Topic.EVENTS, Topic.BOARD})
    TITLE = "Outcome"
    NATURAL = True
    OPENS = "log"
    HELP = (
        "The final summary of the run: its steps and time, the last and the lowest loss, the newest checkpoint, and "
        "the effect of each change beside the predicted one. The cockpit also prints it when it closes."
    )

    def title(self, store: Store) -> str:
        return title(final_summary(store))

    def natural_height(self, store: Store) -> int:
        return len(self._lines(store, max(20, self.content_size.width), self.colours))

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        lines = self._lines(store, width, colours)
        if len(lines) > height > 0:
            hidden = len(lines) - height + 1
            lines = [
                *lines[: height - 1],
                StripLine().add(f"… {hidden} more lines · z shows them", colours.faint),
            ]
        return lines

    def _lines(self, store: Store, width: int, colours: Palette) -> list[StripLine]:
        level = outcome_level(store)
        lines: list[StripLine] = []
        for label, text in outcome_rows(final_summary(store)):
            for number, part in enumerate(wrap([(text, colours.text)], max(8, width - LABEL - 2))):
                mark = level.value if not lines else " "
                line = StripLine().add(f"{mark} ", colours.level[level])
                lines.append(line.add(f"{'' if number else label:<{LABEL}}", colours.dim).extend(part))
        return lines or [StripLine().add(f"{format.MISSING} nothing is known", colours.faint)]


def outcome_level(store: Store) -> Level:
    """The severity level of the final summary, which determines its glyph: bad if the run failed, good if it has done
    all planned steps (or has no planned number of steps), otherwise note."""
    if store.link is LinkState.FAILED:
        return Level.BAD
    return Level.GOOD if store.steps_planned is None or store.finished else Level.NOTE
