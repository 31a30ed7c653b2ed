"""Text that the model generates between two training steps (docs/train/sampling.md).

Like validation, text generation does not affect training: sampling uses its own seed, and routing counts and bytes are
not added to those of the step.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from agents.protocol import SAMPLE, Event, clip
from agents.rank.agent import Agent
from engine.config.layout import Layout
from engine.control.vote import LEADER
from engine.data.prompt import Prompt, sample_prompt
from engine.metering.meter import Meter
from engine.planner.memory.cache import cache_bytes
from engine.sampling.generation import Generated, generate
from engine.sampling.report import Report
from engine.sampling.settings import Choice
from engine.sampling.text import escaped
from engine.sampling.training_model import TrainingModel
from engine.train.computation import Computation
from engine.train.evaluation import evaluation


@dataclass(frozen=True)
class TextSample:
    """A generated sample. `text` includes the prompt; control characters other than newlines and tabs are escaped."""

    step: int
    text: str
    report: Report

    @property
    def event(self) -> Event:
        facts = {"step": self.step, SAMPLE: True, **self.report.facts}
        return Event(time.time(), "info", "engine", clip(self.text), facts)


class TextSamples:
    """Generates samples of text as the layout's section [sample] specifies. Rank 0 sends each sample as an event and
    passes it to `on_sample`. Raises RefusedError."""

    def __init__(
        self,
        layout: Layout,
        computation: Computation,
        meter: Meter,
        agent: Agent,
        on_sample: Callable[[TextSample], None],
    ):
        self._layout, self._computation, self._meter = layout, computation, meter
        self._agent, self._on_sample = agent, on_sample
        self._prompt = sample_prompt(layout)

    def due(self, done: int) -> bool:
        """Whether to generate a sample after `done` steps, that is, every `sample.every` steps and after the
        last step."""
        every = self._layout.sample.every
        return every > 0 and (done % every == 0 or done == self._layout.train.steps)

    def generate(self, step: int) -> None:
        """Generate a sample after `step` and send it. Collective over all ranks."""
        assert self._prompt is not None
        computation, layout = self._computation, self._layout
        # Functions that were compiled for the shapes of a step must not be compiled again for those of single tokens.
        eager = torch.compiler.set_stance("force_eager") if layout.train.compile else nullcontext()
        # Without a capacity, no tokens are dropped, because a capacity depends on the length of the whole
        # sequence.
        with eager, evaluation(computation, self._meter, capacity_factor=None):
            for stage in computation.stages:
                stage.eval()
            try:
                report = self._report(self._prompt)
            finally:
                for stage in computation.stages:
                    stage.train()
        if computation.world.rank == LEADER:
            sample = TextSample(step, _text(self._prompt, report.done), report)
            self._agent.send(sample.event)
            self._on_sample(sample)

    def _report(self, prompt: Prompt) -> Report:
        computation, layout, wanted = self._computation, self._layout, self._layout.sample
        world, positions = computation.world, len(prompt.ids) + prompt.tokens
        model = TrainingModel(layout, computation.stages, world, positions)
        choice = Choice(wanted.temperature, wanted.top_k, wanted.top_p, wanted.seed)
        end = prompt.tokenizer.end_of_document
        done = generate(model, torch.tensor([prompt.ids]), prompt.tokens, choice, end)
        item = model.caches.dtype.itemsize
        formula = cache_bytes(layout.model, len(computation.layers), layout.grid.tp, positions, 1, item)
        found = world.control.all_reduce(torch.tensor([model.caches.bytes, formula]))
        return Report(done, *found.tolist())


def _text(prompt: Prompt, done: Generated) -> str:
    """The prompt and the generated text, without the token that ends the document. Bytes that are not UTF-8 become
    escapes such as \\xff."""
    [new] = done.tokens
    if new[-1] == prompt.tokenizer.end_of_document:
        new = new[:-1]
    ids = [*prompt.ids, *new] if prompt.shown else new
    return escaped(prompt.tokenizer.decode(ids).decode("utf-8", "backslashreplace"))
