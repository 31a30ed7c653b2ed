"""The application for a recorded run: the same screens, with a position line and playback keys."""

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding

from cockpit.data.sources.playback import Playback
from cockpit.data.store import Store
from cockpit.tui.app import CockpitApp
from cockpit.tui.drawing.themes import DEFAULT
from cockpit.tui.keys.action import Action, bindings
from cockpit.tui.keys.general_bindings import APP, NOT_IN_REPLAY, REPLAY, SCREENS


class ReplayApp(CockpitApp, inherit_bindings=False):
    """The Textual application that replays one recorded run."""

    TITLE = "cockpit replay"
    ACTIONS: ClassVar[tuple[Action, ...]] = (
        *(action for action in APP if action.id not in NOT_IN_REPLAY),
        *REPLAY,
    )
    BINDINGS: ClassVar[list[Binding]] = bindings((*SCREENS, *ACTIONS))

    def __init__(
        self,
        playback: Playback,
        keymap: dict[str, str] | None = None,
        theme: str = DEFAULT,
        refreshes_per_s: int = 16,
        folder: Path | None = None,
    ) -> None:
        super().__init__(
            playback,
            Store(playback.clock),
            keymap,
            theme,
            refreshes_per_s=refreshes_per_s,
            recorded=True,
            folder=folder,
        )
        self.playback = playback
        self.navigator = self.make_navigator(self._seek)

    def _seek(self, step: int | None) -> None:
        """Seek to `step` in the recording, or to the end of the recording if `step` is None."""
        if step is None:
            self.playback.ends(1)
        else:
            self.playback.go_to(step, lambda why: self.call_later(self.say, why, severity="warning"))

    def action_pause(self) -> None:
        self.playback.toggle()

    def action_faster(self, by: int) -> None:
        self.playback.faster(by)

    def action_step(self, by: int) -> None:
        self.playback.step(by)

    def action_move(self, by: int) -> None:
        self.playback.jump(by)

    def action_ends(self, by: int) -> None:
        self.playback.ends(by)
