"""The actions pause, resume and stop, which operators can request while a run is live, just as they change its
knobs."""

from agents.rank.knob_board import Knob, action


class RunActions:
    """The actions pause, resume and stop, and the two flags that they set. All ranks set the flags at the same step
    boundary; the trainer reads them."""

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
                "pause after this step; the run still accepts commands; resume continues it",
                pause,
            ),
            action("resume", "continue after a pause", resume),
            action(
                "stop",
                "end the run after this step, with a final checkpoint if checkpoints are on",
                stop,
                True,
            ),
        ]
