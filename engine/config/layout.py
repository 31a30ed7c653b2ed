"""A run as typed data: reads a TOML file, lays command-line overrides over it, and refuses in one sentence.

Torch-free. A schedule, method or mode is legal once parity proves it: it joins a Literal below with its case.
"""

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from engine.config.grid import ORDER, Grid, divisors
from engine.config.schedule_traits import SCHEDULES

LARGEST = 2**31 - 1  # no size of a run is larger, and arithmetic on sizes stays quick
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Layers = Annotated[int, Meta(ge=1, le=1024)]  # stages are split by trying where each may begin
Experts = Annotated[int, Meta(ge=1, le=65_536)]
Above = Annotated[float, Meta(gt=0, le=1e9)]
AtLeast0 = Annotated[float, Meta(ge=0, le=1e9)]
# Not $, which is also before a line end that is last.
Word = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z",
        description="up to 64 letters, digits, '_', '.' and '-', not beginning with '.' or '-'",
    ),
]
Line = Annotated[
    str,
    Meta(
        pattern=r"\A[^\x00-\x1f]{1,4096}\Z",
        description="1 to 4,096 characters of text, without NUL, line ends and other control characters",
    ),
]

Digest = Annotated[
    str, Meta(pattern=r"\Ablake2b-[0-9a-f]{16}\Z", description="blake2b- and 16 hexadecimal digits")
]

# The bounds of knobs, for their start values and for every later change.
CAPACITY_FACTOR = (0.1, 8.0)
LR_SCALE = (0.0, 10.0)
LOSS_COEF = (0.0, 100.0)
BIAS_RATE = (0.0, 1.0)
GRAD_CLIP = (1e-3, 1e3)


class Run(Struct, frozen=True):
    """What the run is called, and where its folder is made."""

    name: Annotated[Word, "what its folder's name begins with"] = "run"
    seed: Annotated[Natural, "of the initial weights and of the samples drawn"] = 0
    dir: Annotated[Line, "the folder that gets a folder for each run"] = "./runs"


class Moe(Struct, frozen=True):
    """The experts of a Mixture of Experts; absent: every layer has a dense MLP (docs/routing.md)."""

    experts: Annotated[Experts, "routed experts of a layer"]
    top_k: Annotated[Positive, "routed experts that a token takes"]
    d_expert: Annotated[Positive, "hidden width of one expert"]
    dense_layers: Annotated[Natural, "leading layers without experts"] = 0
    every: Annotated[
        Positive, "of the layers after those, one in so many has experts, the first of them too"
    ] = 1
    shared_experts: Annotated[Natural, "experts that every token takes, beside its top_k"] = 0
    router: Annotated[Literal["token_choice", "expert_choice"], "which side chooses"] = "token_choice"
    score: Annotated[Literal["softmax", "sigmoid"], "of all experts together, or of each by itself"] = (
        "softmax"
    )
    route_scale: Annotated[Above, "factor on the weights of a token's routed experts"] = 1.0
    balance: Annotated[
        Literal["aux", "bias", "aux+bias", "none"],
        "what evens out the load: a loss per sequence, a bias on the choice, both",
    ] = "aux"
    drop: Annotated[
        Literal["position", "probability"], "who stays within a capacity: the first tokens, or the surest"
    ] = "position"
    groups: Annotated[Positive, "equal runs of experts"] = 1
    top_groups: Annotated[Positive | None, "groups that a token's experts may be of; absent: all"] = None

    @property
    def balances(self) -> list[str]:
        """The means of balancing: of "aux" and "bias" one, both or none."""
        return [] if self.balance == "none" else self.balance.split("+")


class Model(Struct, frozen=True):
    """The transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU or experts."""

    layers: Annotated[Layers, "transformer layers"]
    d_model: Annotated[Positive, "width of the residual stream"]
    heads: Annotated[Positive, "query heads"]
    seq_len: Annotated[Positive, "tokens of a sequence"]
    kv_heads: Annotated[Positive | None, "key and value heads; absent: as many as heads"] = None
    d_ff: Annotated[Positive | None, "hidden width of a dense MLP; absent: 4 d_model"] = None
    vocab: Annotated[Positive, "rows of the embedding; bytes take the first 256"] = 256
    norm_eps: Annotated[Above, "added to the mean square in RMSNorm"] = 1e-5
    rope_theta: Annotated[Above, "base of the rotary frequencies"] = 10_000.0
    tie_embeddings: Annotated[bool, "whether the head multiplies by the embedding's weight"] = False
    moe: Moe | None = None

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ff(self) -> int:
        return self.d_ff or 4 * self.d_model

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer in self.layers_with_experts

    @property
    def layers_with_experts(self) -> range:
        return range(self.moe.dense_layers, self.layers, self.moe.every) if self.moe else range(0)


class GridSizes(Struct, frozen=True):
    """How the ranks are arranged: there are pp x dp_replicate x dp_shard x cp x tp of them."""

    pp: Annotated[Positive, "pipeline parallel"] = 1
    dp_replicate: Annotated[Positive, "replicas of what dp_shard shards (HSDP)"] = 1
    dp_shard: Annotated[Positive, "data parallel, sharded (ZeRO)"] = 1
    cp: Annotated[Positive, "context parallel: ranks that share each sequence"] = 1
    tp: Annotated[Positive, "tensor parallel, with the sequence sharded too"] = 1
    ep: Annotated[Positive, "expert parallel: experts borrow the dp_shard x cp x tp ranks of a stage"] = 1
    ep_method: Annotated[
        Literal["direct", "hierarchical"], "all-to-all at once, or within nodes and then across"
    ] = "direct"
    ep_inner: Annotated[
        Positive | None, "of hierarchical: ep ranks of one node; absent: nearest to ep's square root"
    ] = None
    cp_method: Annotated[
        Literal["ulysses", "ring"],
        "what attention does over cp: trade tokens for heads, or pass keys and values on",
    ] = "ring"


class Schedule(Struct, frozen=True):
    """The order in which pipeline stages run."""

    name: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"],
        "the last four hold several stages a rank",
    ] = "1f1b"
    virtual_stages: Annotated[
        Positive | None, "stages of a rank; absent: the fewest that the schedule takes"
    ] = None


class Train(Struct, frozen=True):
    """The optimisation."""

    steps: Annotated[Positive, "optimizer steps of the run"] = 100
    global_batch: Annotated[Positive, "sequences of a step, over all ranks"] = 32
    optimizer: Annotated[Literal["adamw", "sgd"], "AdamW, or plain gradient descent"] = "adamw"
    lr: Annotated[AtLeast0, "learning rate after the warm-up"] = 1e-3
    warmup: Annotated[Natural, "steps over which the learning rate rises to lr"] = 0
    weight_decay: Annotated[AtLeast0, "of matrices; norms have none"] = 0.0
    grad_clip: Annotated[
        Annotated[float, Meta(ge=GRAD_CLIP[0], le=GRAD_CLIP[1])] | None, "of the global norm; absent: off"
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp8"],
        "of activations; weights, sums and updates are fp32; fp8 is not offered yet",
    ] = "fp32"
    zero: Annotated[
        Literal[0, 1, 2, 3],
        "ZeRO stage: 0 keeps every rank whole; 1 shards the optimizer's state, 2 gradients too, 3 weights too",
    ] = 2
    compile: Annotated[bool, "whether torch.compile makes what lies between matrix products"] = False


class Data(Struct, frozen=True):
    """The text that is trained on. All ranks must find the same."""

    source: Annotated[
        Line,
        "`stdlib`: the Python standard library's own source on this machine; `text:GLOB`: every readable file that the "
        "pattern names (`**` for folders within), in the order of their names, such as `text:/data/**/*.txt`",
    ] = "stdlib"
    tokenizer: Annotated[Literal["bytes"], "a token is a byte"] = "bytes"
    digest: Annotated[Digest | None, "of the text; absent: any, but on resume what the run began with"] = None


class CheckpointSettings(Struct, frozen=True):
    """When training state is saved, and where (docs/checkpoints.md)."""

    every: Annotated[
        Natural, "steps between two; then also at the end and on a stop; 0: only when asked for"
    ] = 0
    keep: Annotated[Positive, "how many of the newest stay"] = 3
    dir: Annotated[Line | None, "a folder that gets one for each run; absent: the run's own"] = None


class Knobs(Struct, frozen=True):
    """Start values of what can be changed while it trains (docs/control.md)."""

    micro_batches: Annotated[Positive, "parts that a data-parallel rank's batch is cut into"] = 1
    capacity_factor: Annotated[
        Annotated[float, Meta(ge=CAPACITY_FACTOR[0], le=CAPACITY_FACTOR[1])] | None,
        "most that an expert takes of a sequence, over an even share; absent: dropless",
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "activation checkpointing: what is forgotten in forward and computed again in backward; selective: attention",
    ] = "none"
    lr_scale: Annotated[
        Annotated[float, Meta(ge=LR_SCALE[0], le=LR_SCALE[1])], "factor on the learning rate"
    ] = 1.0
    aux_loss_coef: Annotated[
        Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])],
        "weight of the balancing loss, where balance has aux",
    ] = 0.01
    z_loss_coef: Annotated[
        Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])], "weight of the loss on large router logits"
    ] = 0.0
    bias_rate: Annotated[
        Annotated[float, Meta(ge=BIAS_RATE[0], le=BIAS_RATE[1])],
        "what a step adds to the bias of an expert that too few chose, where balance has bias",
    ] = 0.001


class Layout(Struct, frozen=True, kw_only=True):
    """A whole run. `load` and `from_toml` give checked ones."""

    model: Model
    run: Run = Run()
    grid: GridSizes = GridSizes()
    schedule: Schedule = Schedule()
    train: Train = Train()
    data: Data = Data()
    checkpoint: CheckpointSettings = CheckpointSettings()
    knobs: Knobs = Knobs()

    @property
    def ranks(self) -> Grid:
        return Grid(**{axis: getattr(self.grid, axis) for axis in (*ORDER, "ep")})

    @property
    def ep_inner(self) -> int | None:
        """Ranks of the inner hop of a hierarchical all-to-all; None where it is direct."""
        ep = self.grid.ep
        if self.grid.ep_method == "direct":
            return None
        return self.grid.ep_inner or min(divisors(ep), key=lambda n: (n + ep // n, -n))

    @property
    def local_batch(self) -> int:
        """Sequences a data-parallel rank works on in one step."""
        return self.train.global_batch // self.ranks.dp

    @property
    def virtual_stages(self) -> int:
        """Stages that a rank holds."""
        return self.schedule.virtual_stages or SCHEDULES[self.schedule.name].virtual_stages or 2

    @property
    def stages(self) -> int:
        return self.grid.pp * self.virtual_stages

    @property
    def tied_apart(self) -> bool:
        """Whether the head is tied to an embedding that is on another rank."""
        in_a_loop = SCHEDULES[self.schedule.name].placement == "loop"
        return self.model.tie_embeddings and self.grid.pp > 1 and in_a_loop

    def digest(self) -> str:
        """Equal for ranks that train the same model on the same data; steps, names and start values do not count."""
        same = (self.model, self.grid, self.schedule.name, self.data, self.run.seed, self.train.global_batch)
        return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=8).hexdigest()

    def whole_digest(self) -> str:
        """Equal for ranks that may train together: everything counts but the run's name and folder."""
        same = msgspec.structs.replace(self, run=Run(seed=self.run.seed))
        return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=8).hexdigest()
