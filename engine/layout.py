"""A run as typed data: reads a TOML file, lays command-line overrides over it, and refuses in one sentence.

Torch-free. A schedule, method or mode is legal once parity proves it: it joins a Literal below with its case.
"""

import difflib
import hashlib
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from agents.reach.reading import read_ordinary
from engine.grid import ORDER, Grid, divisors
from engine.legal import refusals
from engine.planner.stages import SCHEDULES
from engine.sentence import RefusedError, shown

MOST_BYTES = 2**20  # of a file
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


class LayoutError(RefusedError):
    """What is wrong with a layout, where, and what would be legal: one sentence for a person."""


class Run(Struct, frozen=True):
    name: Word = "run"
    seed: Natural = 0
    dir: Line = "./runs"


class Moe(Struct, frozen=True):
    experts: Experts
    top_k: Positive
    d_expert: Positive  # hidden width of one expert
    dense_layers: Natural = 0  # leading layers without experts
    every: Positive = (
        1  # of the layers after those: 1 = each has experts, 2 = every second, the first of them too
    )
    shared_experts: Natural = 0  # that every token takes, beside its top_k
    router: Literal["token_choice", "expert_choice"] = "token_choice"
    score: Literal["softmax", "sigmoid"] = "softmax"
    route_scale: Above = 1.0  # that the weights of a token's routed experts are multiplied by
    balance: Literal["aux", "bias", "aux+bias", "none"] = "aux"
    drop: Literal["position", "probability"] = (
        "position"  # who stays within a capacity: the first, or the surest
    )
    groups: Positive = 1  # equal runs of experts
    top_groups: Positive | None = None  # groups that a token's experts may be of; absent = all

    @property
    def balances(self) -> list[str]:
        """The means of balancing: of "aux" and "bias" one, both or none."""
        return [] if self.balance == "none" else self.balance.split("+")


class Model(Struct, frozen=True):
    layers: Layers
    d_model: Positive
    heads: Positive
    seq_len: Positive  # tokens
    kv_heads: Positive | None = None  # absent = heads
    d_ff: Positive | None = None  # hidden width of a dense MLP; absent = 4 d_model
    vocab: Positive = 256
    norm_eps: Above = 1e-5
    rope_theta: Above = 10_000.0
    tie_embeddings: bool = False  # the head multiplies by the embedding's weight
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
    pp: Positive = 1
    dp_replicate: Positive = 1  # replicas of what dp_shard shards (HSDP)
    dp_shard: Positive = 1
    cp: Positive = 1
    tp: Positive = 1
    ep: Positive = 1
    ep_method: Literal["direct", "hierarchical"] = (
        "direct"  # all-to-all at once, or within nodes, then across
    )
    ep_inner: Positive | None = (
        None  # of hierarchical: ep ranks of one node; absent = nearest to ep's square root
    )
    cp_method: Literal["ulysses", "ring"] = "ring"  # what attention does over cp


class Schedule(Struct, frozen=True):
    name: Literal["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"] = "1f1b"
    virtual_stages: Positive | None = None  # of a rank; absent = the fewest that the schedule takes


class Train(Struct, frozen=True):
    steps: Positive = 100
    global_batch: Positive = 32  # sequences
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: AtLeast0 = 1e-3
    warmup: Natural = 0  # steps
    weight_decay: AtLeast0 = 0.0
    grad_clip: Annotated[float, Meta(ge=GRAD_CLIP[0], le=GRAD_CLIP[1])] | None = (
        None  # of the global norm; absent = off
    )
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"  # of activations; weights, sums and updates are fp32
    zero: Literal[0, 1, 2, 3] = 2
    compile: bool = False  # what lies between matrix products, by torch.compile


class Data(Struct, frozen=True):
    source: Line = "stdlib"
    tokenizer: Literal["bytes"] = "bytes"
    digest: Digest | None = None  # of the text; absent = any, but on resume what the run began with


class Snapshot(Struct, frozen=True):
    every: Natural = 0  # steps; 0 = only when asked for
    keep: Positive = 3  # the newest; older ones are removed
    dir: Line | None = None  # holds one folder a run; absent = the run's own folder


class Knobs(Struct, frozen=True):
    micro_batches: Positive = 1
    capacity_factor: Annotated[float, Meta(ge=CAPACITY_FACTOR[0], le=CAPACITY_FACTOR[1])] | None = (
        None  # absent = dropless
    )
    recompute: Literal["none", "selective", "full"] = "none"
    lr_scale: Annotated[float, Meta(ge=LR_SCALE[0], le=LR_SCALE[1])] = 1.0
    aux_loss_coef: Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])] = 0.01  # of balance = "aux"
    z_loss_coef: Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])] = 0.0
    bias_rate: Annotated[float, Meta(ge=BIAS_RATE[0], le=BIAS_RATE[1])] = 0.001  # a step, of balance = "bias"


class Layout(Struct, frozen=True, kw_only=True):
    """A whole run. `load` and `from_toml` give checked ones."""

    model: Model
    run: Run = Run()
    grid: GridSizes = GridSizes()
    schedule: Schedule = Schedule()
    train: Train = Train()
    data: Data = Data()
    snapshot: Snapshot = Snapshot()
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


def load(path: str | Path, overrides: list[str] | None = None) -> Layout:
    """The layout in a TOML file with ``section.key=value`` overrides; LayoutError says what is wrong."""
    try:
        text = read_ordinary(Path(path), MOST_BYTES).decode()
    except OSError as error:
        raise LayoutError(f"cannot read the layout {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LayoutError(f"the layout {path} is not UTF-8 text") from None
    return from_toml(text, overrides or [], str(path))


def from_toml(text: str, overrides: list[str] | None = None, where: str = "layout") -> Layout:
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number or a nesting too deep for Python is neither, too
        raise LayoutError(f"{where} is not TOML: {_said(error)}") from None
    for override in overrides or []:
        _lay_over(tree, override)
    layout: Layout = _read(Layout, tree, "")
    return checked(layout)


def checked(layout: Layout) -> Layout:
    """The layout, if its parts go together; else LayoutError."""
    for refusal in refusals(layout):
        raise LayoutError(refusal)
    return layout


def _lay_over(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise LayoutError(
            f"{shown(override)} is not an override; write section.key=value, such as train.steps=20"
        )
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise LayoutError(f"{key} is not a key of a layout: {part} is a value, not a section")
    if text.strip() == "none":
        node.pop(path[-1], None)
        node[path[-1]] = None
    else:
        node[path[-1]] = _literal(text.strip())


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _said(error: Exception) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def _read(kind: Any, tree: Any, at: str) -> Any:
    """`tree` as the Struct `kind`, field by field, so that each refusal names its key and what is legal."""
    if not isinstance(tree, dict):
        raise LayoutError(f"{at} = {shown(tree)} is not legal; legal: a section [{at}]")
    hints = typing.get_type_hints(kind, include_extras=True)
    for key in tree:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; legal: {', '.join(hints)}"
            raise LayoutError(f"{_dot(at, key)[:200]} is not a key of a layout{hint}")
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        key, hint = field.name, hints[field.name]
        section = _struct_in(hint)
        if key not in tree:
            if field.required:
                raise LayoutError(f"{_dot(at, key)} is missing; legal: {_legal(hint)}")
        elif section and tree[key] is not None:
            values[key] = _read(section, tree[key], _dot(at, key))
        else:
            value = "none" if tree[key] is None and "none" in _choices(hint) else tree[key]
            try:
                values[key] = msgspec.convert(value, hint)
            except msgspec.ValidationError:
                given = "none" if tree[key] is None else shown(tree[key])
                raise LayoutError(f"{_dot(at, key)} = {given} is not legal; legal: {_legal(hint)}") from None
    return kind(**values)


def _dot(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _struct_in(hint: Any) -> Any:
    kinds = [hint, *get_args(hint)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Struct)), None)


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _legal(hint: Any) -> str:
    """What a type admits, in words."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("none" if arg is type(None) else _legal(arg) for arg in get_args(hint))
    if get_origin(hint) is Literal:
        return ", ".join(str(choice) for choice in get_args(hint))
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if get_origin(hint) is Annotated:
        base, meta = get_args(hint)[:2]
        if meta.description is not None:
            return str(meta.description)
        low = f"from {meta.ge:g}" if meta.ge is not None else f"above {meta.gt:g} and up"
        return f"{words[base]} {low} to {meta.le:g}" if base is float else f"{words[base]} {low} to {meta.le}"
    return words.get(hint, f"a section with {', '.join(typing.get_type_hints(hint))}")
