"""Schema of a layout: the description of a run as typed sections and keys. Torch-free.

The sections are in `engine.config.sections`. To add a schedule, method or mode, add its name to the Literal type of its
key in a section, and add a parity test.
"""

import hashlib
from typing import Any

import msgspec
from msgspec import Struct

from engine.config.grid import ORDER, Grid, divisors
from engine.config.schedule_traits import SCHEDULES
from engine.config.sections.assumptions import HardwareChoice, Plan
from engine.config.sections.data import Data, ValidationSettings
from engine.config.sections.knobs import Knobs
from engine.config.sections.model import Model
from engine.config.sections.parallelism import GridSizes, Schedule
from engine.config.sections.run import CheckpointSettings, Elastic, Run, SampleSettings
from engine.config.sections.training import Compression, LossScale, Train

ADDED_LATER = {  # keys of [model] and [data] that are in a digest only if they are set, so that old digests stay valid
    "attention", "head_dim", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim", "window", "qk_norm", "qkv_bias",
    "bias", "activation", "norm", "positions", "mtp_layers", "shards", "weights", "epochs", "prefetch",
    "separate_documents", "reset_positions", "implementation", "latent_norm_eps", "max_seq_len",
}  # fmt: skip


class Layout(Struct, frozen=True, kw_only=True):
    """Description of a run. `engine.config.toml.load` and `from_toml` check the layouts that they return."""

    model: Model
    run: Run = Run()
    grid: GridSizes = GridSizes()
    schedule: Schedule = Schedule()
    train: Train = Train()
    loss_scale: LossScale = LossScale()
    compression: Compression = Compression()
    data: Data = Data()
    validation: ValidationSettings = ValidationSettings()
    sample: SampleSettings = SampleSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    elastic: Elastic = Elastic()
    knobs: Knobs = Knobs()
    hardware: HardwareChoice = HardwareChoice()
    plan: Plan = Plan()

    @property
    def ranks(self) -> Grid:
        return Grid(**{axis: getattr(self.grid, axis) for axis in (*ORDER, "ep")})

    @property
    def ep_inner(self) -> int | None:
        """The number of ranks in each inner group of a hierarchical all-to-all; None if the all-to-all is direct."""
        ep = self.grid.ep
        if self.grid.ep_method == "direct":
            return None
        return self.grid.ep_inner or min(divisors(ep), key=lambda n: (n + ep // n, -n))

    @property
    def local_batch(self) -> int:
        """Number of sequences that one data-parallel rank processes in a step."""
        return self.train.global_batch // self.ranks.dp

    @property
    def virtual_stages(self) -> int:
        """Number of stages per rank."""
        return self.schedule.virtual_stages or SCHEDULES[self.schedule.name].virtual_stages or 2

    @property
    def stages(self) -> int:
        return self.grid.pp * self.virtual_stages

    @property
    def tied_apart(self) -> bool:
        """Whether the last stage needs a copy of the embedding (for a tied head or multi-token prediction), because the
        embedding itself is on another rank."""
        in_a_loop = SCHEDULES[self.schedule.name].placement == "loop"
        has_copy = self.model.tie_embeddings or self.model.mtp_layers > 0
        return has_copy and self.grid.pp > 1 and in_a_loop

    def digest(self) -> str:
        """Digest of the sections [model], [grid] and [data] (without data.prefetch), the schedule's name, run.seed and
        train.global_batch. All other keys, such as train.steps and the initial values of knobs, are left out. Keys in
        ADDED_LATER are included only if they are set, so that digests of older layouts do not change.
        """
        data = _without_unset(self.data)
        data.pop("prefetch", None)  # prefetch does not affect the samples
        same = (
            _without_unset(self.model),
            self.grid,
            self.schedule.name,
            data,
            self.run.seed,
            self.train.global_batch,
        )
        return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=8).hexdigest()

    def whole_digest(self) -> str:
        """Digest of run.seed and of all keys outside [run]. The digest must be equal on all ranks of a run."""
        same = msgspec.structs.replace(self, run=Run(seed=self.run.seed))
        return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=8).hexdigest()


def _without_unset(section: Struct) -> dict[str, Any]:
    """The values of a section, without the keys in ADDED_LATER that have their default value."""
    unset = {field.name: field.default for field in msgspec.structs.fields(section)}
    values: dict[str, Any] = msgspec.to_builtins(section)
    return {key: value for key, value in values.items() if key not in ADDED_LATER or value != unset[key]}
