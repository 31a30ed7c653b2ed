"""Schema of a layout: the description of a run as typed sections and keys. Torch-free.

To add a schedule, method or mode, add it to a Literal below and add a parity test.
"""

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.config.assumptions import HardwareChoice, Plan
from engine.config.bounds import (
    Above,
    AtLeast0,
    Decay,
    Digest,
    Experts,
    FewBatches,
    FewLayers,
    Layers,
    Line,
    Natural,
    Positive,
    PowerRank,
    Scale,
    Share,
    Word,
)
from engine.config.compression import CompressionValues, Method
from engine.config.grid import ORDER, Grid, divisors
from engine.config.schedule_traits import SCHEDULES

# Bounds of knobs, for start values and for later changes.
CAPACITY_FACTOR = (0.1, 8.0)
LR_SCALE = (0.0, 10.0)
LOSS_COEF = (0.0, 100.0)
BIAS_RATE = (0.0, 1.0)
GRAD_CLIP = (1e-3, 1e3)
RATIO = (1e-6, 1.0)
THRESHOLD = (0.0, 100.0)


class Run(Struct, frozen=True):
    """The run's name, seed and folder."""

    name: Annotated[Word, "the first part of the folder's name"] = "run"
    seed: Annotated[Natural, "seeds the initial weights and the order of samples"] = 0
    dir: Annotated[Line, "parent folder of the run folders"] = "./runs"
    timeout_s: Annotated[
        Positive | None,
        "seconds after which a collective that has not ended fails; absent: torch's, 600 on GPUs and 1800 on CPUs",
    ] = None


class Moe(Struct, frozen=True):
    """Mixture of Experts (docs/routing.md). Without this section every layer has a dense MLP."""

    experts: Annotated[Experts, "routed experts per layer"]
    top_k: Annotated[Positive, "routed experts per token"]
    d_expert: Annotated[Positive, "hidden width of one expert"]
    dense_layers: Annotated[Natural, "leading layers without experts"] = 0
    every: Annotated[
        Positive, "after dense_layers, every n-th layer has experts, starting with the first"
    ] = 1
    shared_experts: Annotated[Natural, "experts that process every token, in addition to its top_k"] = 0
    router: Annotated[
        Literal["token_choice", "expert_choice"], "whether tokens choose experts or experts choose tokens"
    ] = "token_choice"
    score: Annotated[
        Literal["softmax", "sigmoid"], "score over all experts (softmax) or for each expert alone (sigmoid)"
    ] = "softmax"
    route_scale: Annotated[Above, "factor on the weights of the routed experts"] = 1.0
    balance: Annotated[
        Literal["aux", "bias", "aux+bias", "none"],
        "load balancing: an auxiliary loss per sequence, a bias on expert selection, both or none",
    ] = "aux"
    drop: Annotated[
        Literal["position", "probability"],
        "which tokens an expert keeps at its capacity: the first, or those with the highest probability",
    ] = "position"
    groups: Annotated[Positive, "number of expert groups of equal size"] = 1
    top_groups: Annotated[Positive | None, "expert groups that a token may use; absent: all"] = None

    @property
    def balances(self) -> list[str]:
        """The balancing methods in use: "aux", "bias", both or none."""
        return [] if self.balance == "none" else self.balance.split("+")


class Model(Struct, frozen=True):
    """The transformer (docs/models.md). `activation` = gelu, `norm` = layernorm, `positions` = learned and `mtp_layers`
    can be planned and simulated, not trained yet."""

    layers: Annotated[Layers, "transformer layers"]
    d_model: Annotated[Positive, "width of the residual stream"]
    heads: Annotated[Positive, "query heads"]
    seq_len: Annotated[Positive, "tokens per sequence"]
    kv_heads: Annotated[Positive | None, "key and value heads; absent: as many as heads"] = None
    d_ff: Annotated[Positive | None, "hidden width of a dense MLP; absent: 4 d_model"] = None
    vocab: Annotated[Positive, "rows of the embedding; byte tokens use the first 256"] = 256
    norm_eps: Annotated[Above, "added to the mean square in RMSNorm"] = 1e-5
    rope_theta: Annotated[Above, "base of the rotary frequencies"] = 10_000.0
    tie_embeddings: Annotated[bool, "whether the head shares the embedding's weight"] = False
    attention: Annotated[
        Literal["gqa", "mla"], "grouped-query attention, or multi-head latent attention (DeepSeek-V2)"
    ] = "gqa"
    head_dim: Annotated[Positive | None, "width of a head with gqa; absent: d_model / heads"] = None
    q_rank: Annotated[
        Positive | None, "with mla: width of the latent queries; absent: queries are projected directly"
    ] = None
    kv_rank: Annotated[Positive | None, "with mla: width of the latent keys and values"] = None
    nope_dim: Annotated[Positive | None, "with mla: width of a head's key without position"] = None
    rope_dim: Annotated[Positive | None, "with mla: width of the rotary key that all heads share"] = None
    v_dim: Annotated[Positive | None, "with mla: width of a head's value"] = None
    window: Annotated[
        Positive | None,
        "number of newest keys that a query attends to, its own included; absent: all (Mistral)",
    ] = None
    qk_norm: Annotated[bool, "whether each query and key head has an RMSNorm (Qwen3)"] = False
    qkv_bias: Annotated[bool, "whether the projections to queries, keys and values have biases (Qwen2)"] = (
        False
    )
    bias: Annotated[bool, "whether attention and the dense MLP have biases"] = False
    activation: Annotated[
        Literal["swiglu", "gelu"], "of MLPs and experts: gated with three matrices, or plain with two"
    ] = "swiglu"
    norm: Annotated[Literal["rmsnorm", "layernorm"], "LayerNorm has a bias too"] = "rmsnorm"
    positions: Annotated[Literal["rotary", "learned"], "RoPE, or an embedding of seq_len rows"] = "rotary"
    mtp_layers: Annotated[FewLayers, "layers that predict further tokens (DeepSeek-V3)"] = 0
    moe: Moe | None = None

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ff(self) -> int:
        return self.d_ff or 4 * self.d_model

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @property
    def biased_qkv(self) -> bool:
        return self.bias or self.qkv_bias

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def latent(self) -> tuple[int, int, int, int, int]:
        """q_rank (0: none), kv_rank, nope_dim, rope_dim and v_dim of latent attention."""
        return (self.q_rank or 0, self.kv_rank or 0, self.nope_dim or 0, self.rope_dim or 0, self.v_dim or 0)

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer in self.layers_with_experts

    @property
    def layers_with_experts(self) -> range:
        return range(self.moe.dense_layers, self.layers, self.moe.every) if self.moe else range(0)


ADDED_LATER = {  # keys of [model] and [data] that count in a digest only if set, so that older digests stay
    "attention", "head_dim", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim", "window", "qk_norm", "qkv_bias",
    "bias", "activation", "norm", "positions", "mtp_layers", "shards", "weights", "epochs", "prefetch",
}  # fmt: skip


class GridSizes(Struct, frozen=True):
    """Sizes of the parallel axes; the run has pp x dp_replicate x dp_shard x cp x tp ranks."""

    pp: Annotated[Positive, "pipeline parallel size"] = 1
    dp_replicate: Annotated[Positive, "number of replicas of the sharded model (HSDP)"] = 1
    dp_shard: Annotated[Positive, "sharded data parallel size (ZeRO)"] = 1
    cp: Annotated[Positive, "context parallel size: ranks that share each sequence"] = 1
    tp: Annotated[Positive, "tensor parallel size, with sequence parallelism"] = 1
    ep: Annotated[Positive, "expert parallel size, over the dp_shard x cp x tp ranks of a stage"] = 1
    ep_method: Annotated[
        Literal["direct", "hierarchical"], "one all-to-all, or one within nodes and then one across nodes"
    ] = "direct"
    ep_inner: Annotated[
        Positive | None,
        "with hierarchical: ep ranks per node; absent: the divisor nearest to the square root of ep",
    ] = None
    cp_method: Annotated[
        Literal["ulysses", "ring"],
        "attention over cp: all-to-all from tokens to heads (Ulysses), or keys and values passed around a ring",
    ] = "ring"


class Schedule(Struct, frozen=True):
    """The order in which pipeline stages run."""

    name: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"],
        "the last four have several stages per rank",
    ] = "1f1b"
    virtual_stages: Annotated[Positive | None, "stages per rank; absent: the minimum of the schedule"] = None


class Train(Struct, frozen=True):
    """The optimisation."""

    steps: Annotated[Positive, "number of optimizer steps"] = 100
    global_batch: Annotated[Positive, "sequences per step over all ranks"] = 32
    optimizer: Annotated[Literal["adamw", "sgd"], "AdamW, or plain gradient descent"] = "adamw"
    lr: Annotated[AtLeast0, "learning rate after the warm-up"] = 1e-3
    warmup: Annotated[Natural, "steps over which the learning rate rises to lr"] = 0
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        "after the warm-up: constant; linear or cosine decay from there to the last step; or wsd (warm-up, stable, "
        "decay): constant, then a linear decay in the last steps",
    ] = "constant"
    lr_end: Annotated[Share, "learning rate at the end of the decay, as a share of lr"] = 0.0
    decay: Annotated[Positive | None, "with wsd: steps of the decay; absent: a tenth of steps"] = None
    beta1: Annotated[Decay, "AdamW: decay of the mean of gradients"] = 0.9
    beta2: Annotated[Decay, "AdamW: decay of the mean of squared gradients"] = 0.95
    eps: Annotated[Above, "AdamW: added to the root of the mean of squares"] = 1e-8
    ema: Annotated[
        Decay | None,
        "decay of an exponential moving average of the weights, kept beside them and in checkpoints; validation uses "
        "it; absent: none",
    ] = None
    weight_decay: Annotated[AtLeast0, "weight decay of matrices; norms have none"] = 0.0
    grad_clip: Annotated[
        Annotated[float, Meta(ge=GRAD_CLIP[0], le=GRAD_CLIP[1])] | None,
        "maximum of the global gradient norm; absent: no clipping",
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp8"],
        "precision of activations; weights, sums and updates are fp32; fp16 scales the loss; fp8 is planned and "
        "simulated only (docs/precision.md)",
    ] = "fp32"
    zero: Annotated[
        Literal[0, 1, 2, 3],
        "ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights",
    ] = 2
    compile: Annotated[bool, "whether torch.compile fuses the operations between matrix products"] = False
    deterministic: Annotated[
        bool, "whether torch uses only algorithms that give the same bits in every run; slower on GPUs"
    ] = False


class LossScale(Struct, frozen=True):
    """Dynamic loss scaling with train.precision = fp16 (docs/precision.md); the defaults are those of torch's
    GradScaler."""

    initial: Annotated[Scale, "scale of the first step"] = 65536.0
    growth: Annotated[
        Annotated[float, Meta(ge=1.0, le=1024.0)], "factor after `interval` steps without overflow"
    ] = 2.0
    backoff: Annotated[Annotated[float, Meta(ge=1e-3, le=1.0)], "factor after an overflow"] = 0.5
    interval: Annotated[Positive, "steps in a row without overflow before the scale grows"] = 2000


class Compression(Struct, frozen=True):
    """Compression of gradients between the replicas of grid.dp_replicate (docs/compression.md). `method`, `ratio`,
    `threshold` and `rank` are the start values of the knobs compression, compression_ratio and so on."""

    method: Annotated[
        Method,
        "16 or 8 bits per number; only the largest, random or above-threshold elements; low-rank factors",
    ] = "none"
    ratio: Annotated[
        Annotated[float, Meta(ge=RATIO[0], le=RATIO[1])], "share of the elements that top_k and random_k send"
    ] = 0.01
    threshold: Annotated[
        Annotated[float, Meta(ge=THRESHOLD[0], le=THRESHOLD[1])],
        "with threshold: elements larger than this many times the root mean square are sent",
    ] = 2.0
    rank: Annotated[PowerRank, "rank of power_sgd's factors"] = 4
    min_elements: Annotated[Natural, "shards with fewer elements are sent exactly"] = 1024

    def values(self) -> CompressionValues:
        return CompressionValues(self.method, self.ratio, self.threshold, self.rank, self.min_elements)


class Data(Struct, frozen=True):
    """The training text; it must be the same on all ranks (docs/data.md)."""

    source: Annotated[
        Line,
        "`stdlib`: the Python standard library's own source on this machine; `text:GLOB`: every readable file that "
        "matches the pattern (`**` matches any folders), sorted by name, such as `text:/data/**/*.txt`; `shards`: the "
        "folders of `shards`",
    ] = "stdlib"
    tokenizer: Annotated[
        Literal["bytes"], "of stdlib and text: a token is a byte; token shards name their own"
    ] = "bytes"
    shards: Annotated[
        tuple[Line, ...] | None,
        'with source = shards: folders that `engine tokenize` wrote, such as ["web", "code"]',
    ] = None
    weights: Annotated[
        tuple[Above, ...] | None, "share of each folder in the samples, in any unit; absent: by their size"
    ] = None
    epochs: Annotated[
        Positive | None,
        "with source = shards: how often a sample may be used; more steps are refused; absent: without end",
    ] = None
    prefetch: Annotated[
        FewBatches, "batches that a thread reads ahead of training; 0: each is read when it is needed"
    ] = 2
    digest: Annotated[
        Digest | None,
        "digest of the text; absent: any text, but a resumed run requires the text that it began with",
    ] = None


class ValidationSettings(Struct, frozen=True):
    """A text that is not trained on; its loss is measured while the run trains (docs/data.md)."""

    every: Annotated[
        Natural, "steps between two measurements, after which the end of the run measures too; 0: none"
    ] = 0
    source: Annotated[Line, "as data.source"] = "shards"
    shards: Annotated[tuple[Line, ...] | None, "as data.shards"] = None
    sequences: Annotated[
        Positive, "sequences of a measurement, the same each time; a multiple of the data-parallel ranks"
    ] = 32


class CheckpointSettings(Struct, frozen=True):
    """When and where training state is saved (docs/checkpoints.md)."""

    every: Annotated[
        Natural,
        "steps between checkpoints; if not 0, the end of the run and a stop save too; 0: only on request",
    ] = 0
    keep: Annotated[Positive, "number of newest checkpoints to keep"] = 3
    dir: Annotated[
        Line | None, "parent folder of the checkpoint folders of all runs; absent: inside the run's folder"
    ] = None


class Elastic(Struct, frozen=True):
    """What `engine run` does when a rank dies: it can start the ranks again from the newest checkpoint
    (docs/relayout.md)."""

    restarts: Annotated[Natural, "how often the ranks are started again after a failure; 0: the run ends"] = 0
    on_loss: Annotated[
        Literal["restart", "shrink"],
        "start again in the same layout, or in the nearest legal one with at least one rank less",
    ] = "restart"
    min_ranks: Annotated[Positive, "with shrink: fewest ranks with which the run continues"] = 1


class Knobs(Struct, frozen=True):
    """Start values of the knobs, which can be changed while the run trains (docs/control.md)."""

    micro_batches: Annotated[Positive, "micro-batches per step of a data-parallel rank"] = 1
    capacity_factor: Annotated[
        Annotated[float, Meta(ge=CAPACITY_FACTOR[0], le=CAPACITY_FACTOR[1])] | None,
        "maximum tokens of a sequence per expert, as a multiple of an even share; absent: dropless",
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "activation checkpointing: activations that backward computes again; selective: attention only",
    ] = "none"
    lr_scale: Annotated[
        Annotated[float, Meta(ge=LR_SCALE[0], le=LR_SCALE[1])], "factor on the learning rate"
    ] = 1.0
    aux_loss_coef: Annotated[
        Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])],
        "weight of the auxiliary load-balancing loss, if balance includes aux",
    ] = 0.01
    z_loss_coef: Annotated[
        Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])],
        "weight of the router z-loss (on large logits)",
    ] = 0.0
    bias_rate: Annotated[
        Annotated[float, Meta(ge=BIAS_RATE[0], le=BIAS_RATE[1])],
        "per step, added to the bias of an underloaded expert, if balance includes bias",
    ] = 0.001


class Layout(Struct, frozen=True, kw_only=True):
    """Description of a whole run. `engine.config.toml.load` and `from_toml` check the layouts that they return."""

    model: Model
    run: Run = Run()
    grid: GridSizes = GridSizes()
    schedule: Schedule = Schedule()
    train: Train = Train()
    loss_scale: LossScale = LossScale()
    compression: Compression = Compression()
    data: Data = Data()
    validation: ValidationSettings = ValidationSettings()
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
        """The number of ranks in the inner hop of a hierarchical all-to-all; None if the all-to-all is direct."""
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
        """Whether the head shares the weight of an embedding on another rank."""
        in_a_loop = SCHEDULES[self.schedule.name].placement == "loop"
        return self.model.tie_embeddings and self.grid.pp > 1 and in_a_loop

    def digest(self) -> str:
        """Digest of model, data and partition; steps, names and start values of knobs do not count. Keys in
        ADDED_LATER count where they are set, so that digests of older layouts stay as they are."""
        data = _without_unset(self.data)
        data.pop("prefetch", None)  # changes no sample
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
        """Digest of all keys except the run's name and folder. It must be equal on all ranks of a run."""
        same = msgspec.structs.replace(self, run=Run(seed=self.run.seed))
        return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=8).hexdigest()


def _without_unset(section: Struct) -> dict[str, Any]:
    """The values of a section, without those keys in ADDED_LATER that have their default."""
    unset = {field.name: field.default for field in msgspec.structs.fields(section)}
    values: dict[str, Any] = msgspec.to_builtins(section)
    return {key: value for key, value in values.items() if key not in ADDED_LATER or value != unset[key]}
