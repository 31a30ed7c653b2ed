"""Screen 3: the pipeline timeline of a step."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline import PipelinePanel


class Pipeline(RunScreen):
    """The pipeline timeline on the whole screen."""

    NAME = "pipeline"
    SAMPLES = frozenset({"timeline"})

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((PipelinePanel("pipeline"),),)
