"""Layout sections for the run as a whole: its name and folder, checkpoints, restarts, and generated text.
Torch-free."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from engine.config.sections.bounds import Line, Natural, Positive, Prompt, Word


class Run(Struct, frozen=True):
    """The run's name, seed and folder."""

    name: Annotated[Word, "name of the run, with which the name of its folder begins"] = "run"
    seed: Annotated[Natural, "seeds the initial weights and the order of samples"] = 0
    dir: Annotated[Line, "parent folder of the run folders"] = "./runs"
    timeout_s: Annotated[
        Positive | None,
        "seconds after which an unfinished collective fails; absent: torch's default, 600 on GPUs and 1800 "
        "on CPUs",
    ] = None
    collectives: Annotated[
        Line | None,
        "a TOML file with measurements of `engine collectives`: each all-reduce uses the algorithm that "
        "was the fastest for its size; absent: torch's algorithm (docs/plan/collectives.md)",
    ] = None


class CheckpointSettings(Struct, frozen=True):
    """When and where training state is saved (docs/train/checkpoints.md)."""

    every: Annotated[
        Natural,
        "steps between checkpoints; if not 0, one is also saved at the end of the run and at a stop; 0: "
        "only on request and when a signal stops the run",
    ] = 0
    while_saving: Annotated[
        Literal["wait", "skip"],
        "when the previous checkpoint is still being written: training waits for it, or this checkpoint is skipped; "
        "on request and at the end of the run it always waits",
    ] = "wait"
    keep: Annotated[Positive, "number of newest checkpoints to keep"] = 3
    dir: Annotated[
        Line | None, "parent folder of the checkpoint folders of all runs; absent: inside the run's folder"
    ] = None


class Elastic(Struct, frozen=True):
    """What `engine run` does when a rank dies: it can start the ranks again from the newest checkpoint
    (docs/train/relayout.md)."""

    restarts: Annotated[
        Natural,
        "maximum number of times that the ranks are started again after a failure; 0: a failure ends the run",
    ] = 0
    on_loss: Annotated[
        Literal["restart", "shrink"],
        "start again in the same layout, or in the nearest legal one with at least one rank fewer",
    ] = "restart"
    min_ranks: Annotated[Positive, "with shrink: fewest ranks with which the run continues"] = 1


class SampleSettings(Struct, frozen=True):
    """Text that the model generates during training; the run's log shows it (docs/train/sampling.md)."""

    every: Annotated[
        Natural, "steps between two texts; if not 0, there is also one at the end of the run; 0: none"
    ] = 0
    prompt: Annotated[Prompt | None, "the text to continue; absent: the model begins a document"] = None
    tokens: Annotated[
        Positive | None,
        "maximum number of generated tokens; together with the prompt at most model.seq_len; absent: 100, or as many "
        "as fit",
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1000)], "divides the logits; 0: always the most probable token"
    ] = 1.0
    top_k: Annotated[
        Positive | None, "choose only among this many of the most probable tokens; absent: all"
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        "then choose only among the fewest tokens whose probabilities sum to this; absent: all",
    ] = None
    seed: Annotated[Natural, "seed of the random choices; each text of a run uses the same one"] = 0
    tokenizer: Annotated[
        Line | None, "the tokenizer.json with which token shards were written; absent: bytes"
    ] = None
