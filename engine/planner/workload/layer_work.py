"""The operations of each kind of layer on one rank and for one micro-batch.

The bytes of a pointwise operation are the sizes, in bf16, of all tensors that its kernel reads or writes. Kernels are
assumed to be fused as in Megatron-LM and torch.compile: one kernel each for norm, rotary positions, bias with
activation, dropout with residual, and the permutation of tokens before and after the experts.
"""

from functools import lru_cache
from math import ceil

from engine.planner.workload.flops import mean_keys
from engine.planner.workload.job import Job
from engine.planner.workload.operations import (
    WIDTH,
    AttentionCore,
    Collective,
    Gemm,
    Memory,
    Operation,
    Work,
)
from engine.planner.workload.transformer import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    StateSpace,
)

BF16 = 2  # bytes
SUM = 4  # bytes of an element that the engine sums in fp32
COUNT = 8  # bytes of the number of rows that an expert gets
SLICE_COUNT, SCORE = (
    4,
    2,
)  # bytes of an expert's number of tokens in a slice, and of a token's score for an expert
CHUNK = 128  # length of a chunk of the state-space scan, in tokens
SCAN_PASSES = 4  # passes of the scan's kernels over the inner channels: chunk states, state passing, outputs
SEPARATE_SOFTMAX = (
    12  # additional bf16 elements per score, in forward as in backward, without a fused softmax
)
STATE_PASSES = 4  # passes over the fp32 states at chunk ends: written, updated in place, read


class Operations:
    """Collects forward operations and derives the backward operations."""

    def __init__(self, job: Job):
        self.job = job
        self.forward: list[Operation] = []
        self.backward: list[Operation] = []
        self.core: list[Operation] = []
        grid = job.grid
        self.tp = grid.tp
        self.tokens = job.micro_batch * job.seq_len / grid.cp
        self.slice = self.tokens / (self.tp if job.sequence_parallel else 1)
        self.low = job.precision in ("fp8", "nvfp4")
        self.part = "mixer"

    def launched(self, kernels: float) -> float:
        """Number of kernels that the host launches one by one: 0 if the kernels are part of a CUDA graph."""
        return 0 if self.part in self.job.graphs else kernels

    def gemm(self, m: float, n: float, k: float, count: float = 1, wide: bool = False) -> Gemm:
        """Add a linear layer with an m x k input and an m x n output."""
        kernels = self.launched(1 if self.job.grouped else count)
        product = Gemm(m, n, k, count, kernels, wide=wide)
        self.forward.append(product)
        self.backward.append(Gemm(m, k, n, count, kernels, wide=wide))
        if not self.job.adapters:
            self.backward.append(Gemm(n, k, m, count, kernels, accumulate=True, wide=wide))
        if not self.job.fused_attention:
            # Reads a bf16 gradient and adds it to an fp32 sum.
            self.backward.append(Memory(10 * n * k * count))
        if self.low and not wide:
            # Norm and activation kernels write the quantised values. The transposed copy for the weight gradient, and
            # half of the gradients, are quantised by separate kernels (Transformer Engine).
            self.forward.append(Memory(2 * m * k * count, kernels))
            self.backward.append(Memory(2 * m * n * count, kernels))
        return product

    def memory(self, forward: float, backward: float, kernels: float = 1, again: float = 1) -> None:
        """Add pointwise work. `forward` and `backward`: bf16 elements moved; `again`: kernels in the backward pass per
        kernel in the forward pass."""
        kernels = self.launched(kernels)
        self.forward.append(Memory(BF16 * forward, kernels))
        self.backward.append(Memory(BF16 * backward, kernels * again))

    def norm(self, tokens: float, width: float) -> None:
        self.memory(2 * tokens * width, 4 * tokens * width, again=2)

    def residual(self, width: float) -> None:
        """Add the pointwise operations of a residual connection: dropout or bias, and the addition to the residual
        stream."""
        self.memory(3 * self.slice * width, 2 * self.slice * width)

    def gather(self, width: float, behind: Gemm | None = None) -> None:
        """Gather the slices of each sequence over tp. Without sequence parallelism there are no slices to gather, so
        only the backward pass communicates: it sums the gradient of the input over tp (f in the Megatron-LM paper)."""
        self._tp("all_gather" if self.job.sequence_parallel else None, width, behind)

    def scatter(self, width: float, behind: Gemm | None = None) -> None:
        self._tp("reduce_scatter" if self.job.sequence_parallel else "all_reduce", width, behind)

    def _tp(self, kind: str | None, width: float, behind: Gemm | None) -> None:
        if self.tp == 1:
            return
        size = self.tokens * width * WIDTH[self.job.precision]
        other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", None: "all_reduce"}
        for operations, name in ((self.forward, kind), (self.backward, other.get(kind))):
            if name:
                operations.append(Collective("tp", name, size, self.tp, 1, behind))  # type: ignore[arg-type]
        if kind == "all_gather" and self.job.framework == "megatron":
            # The forward pass saves only the slice, so the backward pass gathers it again during a matmul.
            self.backward.append(Collective("tp", "all_gather", size, self.tp, 1, behind))

    def work(self) -> Work:
        forward = tuple(self.forward)
        return Work(forward, tuple(self.backward), tuple(self.core), self.repeated())

    def repeated(self) -> tuple[Operation, ...]:
        """The operations that the backward pass runs again if all operations added so far are recomputed. torch stops
        the recomputation at the last saved tensor. The backward pass of the last matmul needs the input of this matmul
        but not its output, so the engine does not run the last matmul again."""
        forward = tuple(self.forward)
        if self.job.framework != "engine":
            return forward
        last = max((n for n, op in enumerate(forward) if isinstance(op, Gemm)), default=len(forward))
        return tuple(op for n, op in enumerate(forward) if _repeats(op, n < last))


def _repeats(op: Operation, needed: bool) -> bool:
    """Whether recomputation repeats `op`; `needed`: a matmul follows it. Recomputation also repeats the all-to-alls
    that return the experts' outputs, because the backward pass needs them for the gradients of the routing weights."""
    if isinstance(op, Collective):
        return op.repeated and (needed or op.load is not None)
    return needed


@lru_cache(maxsize=4096)
def layer_work(job: Job, layer: Layer) -> Work:
    """The operations of a layer."""
    operations, width = Operations(job), job.model.d_model
    if layer.mixer:
        operations.norm(operations.slice, width)
        _mixer(operations, layer.mixer, width)
        operations.residual(width)
        if job.framework == "engine":  # selective recompute runs the whole attention block again
            operations.core = list(operations.repeated())
    if layer.mlp:
        operations.norm(operations.slice, width)
        _feed_forward(operations, layer.mlp, width)
        operations.residual(width)
    return operations.work()


def _mixer(ops: Operations, mixer: Mixer, width: float) -> None:
    match mixer:
        case Attention():
            _attention(ops, mixer, width)
        case LatentAttention():
            _latent_attention(ops, mixer, width)
        case StateSpace():
            _state_space(ops, mixer, width)


def _attention(ops: Operations, mixer: Attention, width: float) -> None:
    tokens = ops.tokens
    heads, kv = mixer.heads / ops.tp, max(1, mixer.kv_heads / ops.tp)
    n = (heads + 2 * kv) * mixer.head_dim
    ops.gather(width, Gemm(tokens, n, width))
    ops.gemm(tokens, n, width)
    if ops.job.model.positions == 0:
        rotated = tokens * (heads + kv) * mixer.head_dim
        ops.memory(2 * rotated, 2 * rotated, kernels=2)
        if mixer.qk_norm:
            ops.memory(2 * rotated, 4 * rotated, kernels=2)
    keys = mean_keys(ops.job.seq_len, mixer.window)
    apart = mixer.sinks and mixer.window is not None
    _core(ops, heads, kv, keys, mixer.head_dim, mixer.head_dim, apart)
    out = ops.gemm(tokens, width, heads * mixer.head_dim)
    ops.scatter(width, out)


def _latent_attention(ops: Operations, mixer: LatentAttention, width: float) -> None:
    """Every tp rank runs the down-projections on its slice of the sequence."""
    tokens, heads = ops.tokens, mixer.heads / ops.tp
    qk = mixer.nope_dim + mixer.rope_dim
    if mixer.q_rank:
        ops.gemm(ops.slice, mixer.q_rank, width)
        ops.norm(ops.slice, mixer.q_rank)
    ops.gather(mixer.q_rank or width)
    ops.gemm(tokens, heads * qk, mixer.q_rank or width)
    ops.gemm(ops.slice, mixer.kv_rank + mixer.rope_dim, width)
    ops.norm(ops.slice, mixer.kv_rank)
    ops.gather(mixer.kv_rank + mixer.rope_dim)
    ops.gemm(tokens, heads * (mixer.nope_dim + mixer.v_dim), mixer.kv_rank)
    # Elements of queries, keys and values of all heads, with rotary positions.
    joined = tokens * heads * (2 * qk + mixer.v_dim)
    ops.memory(2 * joined, 2 * joined, kernels=4)
    keys = mean_keys(ops.job.seq_len, None)
    _core(ops, heads, heads, keys, qk, mixer.v_dim)
    out = ops.gemm(tokens, width, heads * mixer.v_dim)
    ops.scatter(width, out)


def _core(
    ops: Operations, heads: float, kv: float, keys: float, qk: float, v: float, apart: bool = False
) -> None:
    """Add the attention scores, the softmax, the weighted sum of values, and the collectives over cp. `apart`: the
    scores, the softmax and the weighted sum run in separate kernels, not in a fused kernel. Sliding-window attention
    with sinks is assumed to be unfused, because Megatron-Bridge uses unfused attention for sinks if Transformer Engine
    is older than 2.8. Predictions match the published times of gpt-oss on H100 and B300 only with this assumption."""
    job, tokens = ops.job, ops.tokens
    before = len(ops.forward)
    cp, moved = job.grid.cp, WIDTH[job.precision]
    if cp > 1:
        if job.cp_method == "ring":
            size = tokens * kv * (qk + v) * moved * cp
            # The engine sums gradients of keys and values in fp32.
            summed = size * SUM / moved if job.framework == "engine" else size
            ops.forward.append(Collective("cp", "all_gather", size, cp, ops.tp))
            ops.backward.append(Collective("cp", "all_gather", size, cp, ops.tp))
            ops.backward.append(Collective("cp", "reduce_scatter", summed, cp, ops.tp))
        else:
            size = tokens * (heads + max(kv, cp)) * (qk + v) * moved  # a rank has at least one KV head
            ops.forward.append(Collective("cp", "all_to_all", size, cp, ops.tp))
            ops.backward.append(Collective("cp", "all_to_all", size, cp, ops.tp))
    if job.fused_attention and not apart:
        ops.forward.append(AttentionCore(heads, tokens, keys, qk, v))
        ops.backward.append(AttentionCore(heads, tokens, keys, qk, v, backward=True))
        ops.backward.append(Memory(BF16 * 2 * tokens * heads * v, 2))
    else:
        # Batched matmuls run over all keys. Scores are written, masked, normalised, dropped out, and read again.
        seq, batch = job.seq_len, heads * job.micro_batch
        scores = batch * seq * (seq / cp)
        ops.forward += [Gemm(seq / cp, seq, qk, batch), Gemm(seq / cp, v, seq, batch)]
        ops.backward += [Gemm(seq / cp, qk, seq, 2 * batch, 2), Gemm(seq / cp, seq, v, 2 * batch, 2)]
        if apart:  # these kernels have no dropout and skip the masked half
            ops.memory(scores, 1.5 * scores)
        else:
            ops.memory(4.5 * scores, 5.5 * scores, kernels=2)
            if not _fuses_softmax(seq, batch):
                ops.memory(SEPARATE_SOFTMAX * scores, SEPARATE_SOFTMAX * scores, kernels=4)
        copied = tokens * (2 * heads + 2 * kv) * v  # transposed to put heads before the sequence, and back
        ops.memory(2 * copied, 2 * copied, kernels=4)
    ops.core += ops.forward[before:]


def _fuses_softmax(keys: float, heads: float) -> bool:
    """Whether Megatron-LM has a fused kernel that scales and masks the attention scores of a micro-batch and computes
    the softmax (megatron/model/fused_softmax.py, `is_kernel_available`). Otherwise torch runs five kernels: cast,
    scale, mask, softmax and cast."""
    return 16 < keys <= 2048 and heads % 4 == 0


def _state_space(ops: Operations, mixer: StateSpace, width: float) -> None:
    tokens, inner = ops.tokens, mixer.heads * mixer.head_dim / ops.tp
    shared = 2 * mixer.groups * mixer.state / ops.tp
    n = 2 * inner + shared + mixer.heads / ops.tp
    ops.gather(width, Gemm(tokens, n, width))
    ops.gemm(tokens, n, width)
    ops.memory(2 * tokens * (inner + shared), 3 * tokens * (inner + shared))
    before = len(ops.forward)
    within = AttentionCore(mixer.heads / ops.tp, tokens, CHUNK / 2, mixer.state, mixer.head_dim)
    states = AttentionCore(mixer.heads / ops.tp, tokens, mixer.state, mixer.head_dim, mixer.head_dim)
    ops.forward += [within, states]
    ops.backward += [within, within, states, states]
    passed = tokens * inner * (SCAN_PASSES + STATE_PASSES * 2 * mixer.state / CHUNK)
    ops.memory(passed, 2 * passed, kernels=5, again=2)
    ops.core += ops.forward[before:]
    ops.memory(3 * tokens * inner, 5 * tokens * inner)
    out = ops.gemm(tokens, width, inner)
    ops.scatter(width, out)


def _feed_forward(ops: Operations, mlp: FeedForward, width: float) -> None:
    match mlp:
        case Dense():
            _dense(ops, ops.tokens, mlp.hidden / ops.tp, mlp.gated, width)
        case Experts():
            _experts(ops, mlp, width)


def _dense(ops: Operations, tokens: float, hidden: float, gated: bool, width: float, tp: bool = True) -> None:
    n = hidden * (1 + gated)
    if tp:
        ops.gather(width, Gemm(tokens, n, width))
    ops.gemm(tokens, n, width)
    ops.memory((2 + gated) * tokens * hidden, (3 + 2 * gated) * tokens * hidden)
    out = ops.gemm(tokens, width, hidden)
    if tp:
        ops.scatter(width, out)


def _experts(ops: Operations, mlp: Experts, width: float) -> None:
    job, grid = ops.job, ops.job.grid
    tokens = ops.slice
    ops.part = "router"
    ops.gemm(tokens, mlp.experts, width, wide=True)
    ops.memory(6 * tokens * mlp.experts, 4 * tokens * mlp.experts, kernels=12)
    wide = mlp.latent or width
    if mlp.latent:
        ops.gemm(tokens, mlp.latent, width)
    pairs = tokens * mlp.top_k * job.pairs_run
    ops.memory(2 * pairs * wide, 2 * pairs * wide, kernels=4)
    load = job.busiest_rank
    exchanged = pairs * wide * WIDTH[job.precision] * load
    if job.framework == "engine":
        _announce(ops, mlp)
    to_experts = [
        Collective("ep", "all_to_all", exchanged, ranks, stride, copies=mlp.top_k, load=load)
        for ranks, stride in _hops(job)
    ]
    for hop in to_experts:
        _both(ops, hop)
    if job.etp > 1:
        _both(ops, Collective("ep", "all_gather", exchanged * job.etp, job.etp, load=load))
    local = ceil(mlp.experts / grid.ep)
    rows = pairs * job.etp / local * job.busiest_rank
    hidden = mlp.hidden / job.etp
    ops.part = "experts"
    if grid.ep > 1:
        ops.memory(2 * rows * local * wide, 2 * rows * local * wide, kernels=2)
    ops.gemm(rows, hidden * (1 + mlp.gated), wide, local)
    ops.memory((2 + mlp.gated) * rows * local * hidden, (3 + 2 * mlp.gated) * rows * local * hidden)
    ops.gemm(rows, wide, hidden, local)
    if grid.ep > 1:
        ops.memory(2 * rows * local * wide, 2 * rows * local * wide, kernels=2)
    if job.etp > 1:
        _both(ops, Collective("ep", "reduce_scatter", exchanged * job.etp, job.etp, load=load))
    for hop in reversed(to_experts):
        _both(ops, hop)
    ops.memory((pairs + tokens) * wide, 2 * pairs * wide, kernels=4)
    if mlp.latent:
        ops.gemm(tokens, width, mlp.latent)
    if mlp.shared_hidden:
        shared_over_tp = job.framework == "megatron"
        hidden = mlp.shared_hidden / (ops.tp if shared_over_tp else 1)
        _dense(ops, ops.tokens if shared_over_tp else tokens, hidden, mlp.gated, width, tp=shared_over_tp)


def _hops(job: Job) -> list[tuple[int, int]]:
    """The all-to-alls over which a token reaches its expert: the number of ranks of each, and their stride."""
    inner, ep = job.ep_inner or job.grid.ep, job.grid.ep
    hops = [(inner, job.etp), (ep // inner, job.etp * inner)]
    return [(ranks, stride) for ranks, stride in hops if ranks > 1]


def _announce(ops: Operations, mlp: Experts) -> None:
    """Add the small exchanges of the engine's routers (docs/evidence/bytes.md): the scores or the counts of the other
    slices of a sequence, and the number of rows for each expert. Recomputation does not repeat them."""
    job, grid = ops.job, ops.job.grid
    axis, slices = ("cp" if grid.cp > 1 else "tp"), grid.cp * grid.tp
    halves = 2 if grid.cp > 1 else 1
    counts, scores = job.micro_batch * halves * mlp.experts * SLICE_COUNT, ops.slice * mlp.experts * SCORE
    for size in job.router_counts * [counts] + job.router_scores * [scores] if slices > 1 else ():
        ops.forward.append(Collective(axis, "all_gather", size * slices, slices, repeated=False))
    for ranks, stride in _hops(job):
        ops.forward.append(Collective("ep", "all_to_all", mlp.experts * COUNT, ranks, stride, repeated=False))


def _both(ops: Operations, collective: Collective) -> None:
    """Add `collective` to the forward and the backward pass. In the backward pass, an all-gather becomes a
    reduce-scatter and vice versa, but the two take the same time."""
    ops.forward.append(collective)
    ops.backward.append(collective)
