"""The knob `layout`, with which an operator changes the parallel layout of a live run.

All ranks agree on the new layout at a step boundary, save a checkpoint and exit; the launcher then starts the ranks of
the new layout from this checkpoint (`engine.launch.restarts.decision`).
"""

from collections.abc import Callable

import torch

from agents.protocol import Legal
from agents.rank.knob_board import Knob, Values
from engine.config.checks.supported import unsupported
from engine.config.layout import Layout
from engine.config.relayout import FORM, KNOB, layout_text, relaid
from engine.model.interface import implementation_of
from engine.preflight.memory import memory_refusal, too_few_gpus


class Relayout:
    """Carries out a change of the knob `layout` on one rank. `requested`: the text of the layout in which the ranks
    will restart, or None."""

    def __init__(
        self, layout: Layout, device: torch.device, save: Callable[[object], None], paused: Callable[[], bool]
    ):
        self._layout, self._device, self._save, self._paused = layout, device, save, paused
        self.requested: str | None = None
        self.leaving = False  # whether the checkpoint is saved, so that the ranks can exit

    def knob(self) -> Knob:
        return Knob(
            KNOB,
            lambda _: Legal(form=FORM),
            True,
            "how the ranks share the work; a change saves a checkpoint and restarts the ranks in the new "
            "layout",
            self._request,
            self._prepare,
            cast=self._canonical,
        )

    def _canonical(self, value: object) -> str:
        """The string for the new layout, in canonical form. Raises ValueError if this run cannot continue in that
        layout."""
        new = relaid(self._layout, str(value))
        if layout_text(new) == layout_text(self._layout):
            raise ValueError("the run already has this layout")
        if refusal := unsupported(new, implementation_of(new.model).support):
            raise ValueError(refusal)
        if refusal := memory_refusal(new):
            raise ValueError(refusal)
        if self._device.type == "cuda" and torch.cuda.device_count() < new.ranks.world:
            raise ValueError(too_few_gpus(torch.cuda.device_count(), new.ranks.world))
        return layout_text(new)

    def _prepare(self, values: Values) -> str:
        if self._paused():
            raise ValueError("the run is paused; resume it before you change its layout")
        return str(values[KNOB])

    def _request(self, text: str) -> None:
        self.requested = text
        self._save(None)
