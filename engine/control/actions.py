"""Actions of the knob board for the run as a whole: pause, resume, stop."""

from collections.abc import Callable
from typing import Any

from agents.protocol import Legal
from agents.rank.knob_board import Knob


class RunActions:
    """The requested state of the run on one rank. All ranks set it at the same step boundary; the trainer obeys it."""

    def __init__(self) -> None:
        self.paused = False
        self.stopping = False

    def knobs(self) -> list[Knob]:
        def pause(_: object) -> None:
            self.paused = True

        def resume(_: object) -> None:
            self.paused = False

        def stop(_: object) -> None:
            self.stopping = True

        return [
            action(
                "pause",
                "pause when the step ends; the run still accepts commands, resume continues it",
                pause,
            ),
            action("resume", "continue after a pause", resume),
            action(
                "stop", "end the run when the step ends, with a last checkpoint if it saves any", stop, True
            ),
        ]


def action(name: str, about: str, do: Callable[[Any], None], ends: bool = False) -> Knob:
    """An action without a choice of values. `ends`: it ends the run."""
    return Knob(
        name, lambda _: Legal(choices=[True]), True, about, do, lambda _: None, action=True, ends=ends
    )
