"""Lists the tensors that the engine keeps, for one layer, between the layer's forward and backward passes.

Each entry is one torch storage. The list does not contain weights. Entries are in the order of the forward pass in
`engine/model`. Tests compare the list with the storages that a real forward pass saves
(`tests/unit/engine/counts/test_saved.py`).

The norm saves its normalised input (the input divided by its root mean square). The output of the norm is saved as the
input of the next matmuls. With tp, the sequence is gathered for matmuls, and the gathered copy is saved in place of the
slice.
"""

from typing import Literal, NamedTuple

from engine.planner.memory.sizes import BOOL, FP32, INT64, Rows, Sizes
from engine.planner.workload.job import Job
from engine.planner.workload.transformer import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    Transformer,
)

Kind = Literal["attention", "mlp", "moe", "input", "logits"]


class Saved(NamedTuple):
    """One saved storage. `kind`: category under which the storage is counted."""

    kind: Kind
    name: str
    bytes: float


def saved_of_layer(job: Job, layer: Layer) -> list[Saved]:
    """The storages that a layer saves under the job's recompute mode.

    Mode "full" saves the layer's input and, with experts, the routing decisions, because the recomputed forward pass
    must route tokens in the same way. Mode "selective" saves the input of the attention block and all storages of the
    MLP block.
    """
    sizes = Sizes.of(job)
    kept = [Saved("input", "input", sizes.slice_tokens * job.model.d_model * sizes.stream)]
    match job.recompute:
        case "full":
            return kept + (_routing(job, layer.mlp) if isinstance(layer.mlp, Experts) else [])
        case "selective":
            return kept + _mlp_block(job, layer.mlp)
        case _:
            return _mixer_block(job, layer.mixer) + _mlp_block(job, layer.mlp)


def saved_of_embedding(job: Job) -> list[Saved]:
    """The storages that the embedding saves: the row index of each token id in this rank's part of the table, and a
    mask of the token ids that this part does not contain."""
    tokens = Sizes.of(job).tokens
    return [Saved("input", "ids", tokens * INT64), Saved("input", "elsewhere", tokens * BOOL)]


def saved_of_head(job: Job) -> list[Saved]:
    """The storages of the last norm, the head and the loss. The loss keeps the logits, and its backward pass overwrites
    them with their gradient. In a pipeline the schedule also keeps the logits; `peak.between_stages` counts these."""
    sizes, model = Sizes.of(job), job.model
    T = sizes.tokens
    logits = Saved("logits", "logits", T * model.vocab / sizes.tp * sizes.stream)
    return [
        *_norm("logits", sizes, model),
        Saved("logits", "head_input", T * model.d_model * sizes.stream),
        *([logits] if job.grid.pp == 1 else []),
        Saved("logits", "log_sum_exp", T * FP32),
        Saved("logits", "index", T * INT64),
        Saved("logits", "owned", T * BOOL),
        Saved("logits", "valid", T * BOOL),
    ]


def saved_of_prediction(job: Job) -> list[Saved]:
    """The storages that a module of multi-token prediction saves before its layer: those of the embedding and of the
    norms of hidden state and embedding, and their results, which are joined."""
    sizes, model = Sizes.of(job), job.model
    joined = Saved("input", "joined", 2 * sizes.slice_tokens * model.d_model * sizes.stream)
    return [*saved_of_embedding(job), *_norm("input", sizes, model), *_norm("input", sizes, model), joined]


def saved_of_documents(job: Job) -> list[Saved]:
    """In a run on CPUs, the storages that attention saves for the backward pass if tokens attend only within their
    document: the masks and, if positions restart, the rotary tables. All layers of a stage share these storages. On a
    GPU, the block masks of flex attention are kept instead; they are too small to count."""
    if not job.documents:
        return []
    sizes, model = Sizes.of(job), job.model
    S = job.seq_len // sizes.cp
    # In a ring the rank's own block is S x S, and half of every other rank's block is visible.
    ring = sizes.cp > 1 and job.cp_method == "ring"
    pairs = S * S * (1 + (sizes.cp - 1) / 2) if ring else job.seq_len**2
    saved = [Saved("attention", "masks", sizes.batch * pairs * sizes.stream)]
    if job.documents == "reset":
        mixer = model.layers[0].mixer
        assert isinstance(mixer, Attention | LatentAttention)
        width = mixer.rope_dim if isinstance(mixer, LatentAttention) else mixer.head_dim
        if job.recompute != "none":
            saved.append(Saved("attention", "positions", sizes.tokens * INT64))
        saved.append(Saved("attention", "rope", 2 * sizes.tokens * width * FP32))
    return saved


def _norm(kind: Kind, sizes: Sizes, model: Transformer) -> list[Saved]:
    t = sizes.slice_tokens
    return [Saved(kind, "unit", t * model.d_model * sizes.stream), Saved(kind, "scale", t * FP32)]


def _mixer_block(job: Job, mixer: Mixer | None) -> list[Saved]:
    if mixer is None:
        return []
    if isinstance(mixer, LatentAttention):
        return _latent_attention(job, mixer)
    assert isinstance(mixer, Attention), "the engine trains no other mixers"
    sizes = Sizes.of(job)
    T, a, tp, cp, C = sizes.tokens, sizes.stream, sizes.tp, sizes.cp, mixer.head_dim
    heads, kv = mixer.heads / tp, mixer.kv_heads / tp
    ulysses = cp > 1 and job.cp_method == "ulysses"
    if ulysses:
        kv = max(kv, cp)  # a KV head is copied to every cp rank that needs it
    own = heads + mixer.kv_heads / tp
    # The norm of a head saves the head divided by its root mean square.
    norms = [
        Saved("attention", "unit_heads", T * own * C * a),
        Saved("attention", "head_scales", T * own * FP32),
    ]
    saved = [
        *_norm("attention", sizes, job.model),
        Saved("attention", "input", T * job.model.d_model * a),
        *(norms if mixer.qk_norm else []),
        Saved("attention", "qkv", T * (heads + 2 * kv) * C * a),
        Saved("attention", "out", T * heads * C * a),
        Saved("attention", "log_sum_exp", T * heads * FP32),
    ]
    if mixer.window and mixer.window < job.seq_len and not job.documents:
        ranks = sizes.cp if ulysses else 1
        saved += _window(sizes, job.seq_len, mixer.window, heads / ranks, C)
    if ulysses:  # the outputs of attention are sent back to the ranks of their tokens
        saved.append(Saved("attention", "returned", T * heads * C * a))
    return saved


def _window(sizes: Sizes, seq_len: int, W: int, heads: float, C: int) -> list[Saved]:
    """The storages that attention saves in addition if it is limited to a window of W keys. For each block of W queries
    after the first, attention saves copies of the queries and of two blocks of keys and values. The two kernel calls,
    for the first block and for the later blocks, also save their outputs, which are then copied into one tensor."""
    later = sizes.batch * (-(-seq_len // W) - 1) * W * heads
    first = sizes.batch * W * heads
    return [
        Saved("attention", "blocks", (later + 4 * later) * C * sizes.stream),
        Saved("attention", "out_of_blocks", (first + later) * C * sizes.stream),
        # The padding at the end of the sequence also has log-sum-exps.
        Saved("attention", "log_sum_exp", (first + later - sizes.batch * seq_len * heads) * FP32),
        Saved("attention", "mask", 2 * W * W * sizes.stream),
    ]


def _latent_attention(job: Job, mixer: LatentAttention) -> list[Saved]:
    """The storages that latent attention (MLA) saves for the backward pass. The kernel needs equal head dimensions, so
    values (or queries and keys) with a smaller one are padded with zeros, and the kernel saves the padded copies.
    """
    sizes, D = Sizes.of(job), job.model.d_model
    t, T, a, tp = sizes.slice_tokens, sizes.tokens, sizes.stream, sizes.tp
    qk, v, X = mixer.nope_dim + mixer.rope_dim, mixer.v_dim, T * mixer.heads / tp * a
    wide, latents = max(qk, v), mixer.kv_rank + (mixer.q_rank or 0)
    ulysses = sizes.cp > 1 and job.cp_method == "ulysses"
    saved = [
        *_norm("attention", sizes, job.model),
        Saved("attention", "input", t * D * a),
        Saved("attention", "unit_latents", t * latents * a),
        Saved("attention", "latent_scales", t * (2 if mixer.q_rank else 1) * FP32),
        # With tp, the gathered inputs of the up-projections, together with the rotary key (and, without
        # q_rank, the input).
        Saved(
            "attention",
            "latents",
            T * (latents + (mixer.rope_dim + (0 if mixer.q_rank else D) if tp > 1 else 0)) * a,
        ),
        Saved("attention", "qk", X * 2 * wide),
        # Values that are not padded are a view of the up-projection's output, which also holds the keys
        # without position.
        Saved("attention", "v", X * (wide if v < qk else mixer.nope_dim + v)),
        Saved("attention", "out", X * wide),
        Saved("attention", "log_sum_exp", T * mixer.heads / tp * FP32),
    ]
    if ulysses or v != qk:  # with padding, the kernel's output is copied
        saved.append(Saved("attention", "projected", X * v))
    return saved


def _mlp_block(job: Job, mlp: FeedForward | None) -> list[Saved]:
    match mlp:
        case None:
            return []
        case Dense():
            sizes = Sizes.of(job)
            T, a, width = sizes.tokens, sizes.stream, mlp.hidden / sizes.tp
            return [
                *_norm("mlp", sizes, job.model),
                Saved("mlp", "input", T * job.model.d_model * a),
                *(Saved("mlp", name, T * width * a) for name in ("gate", "up", "hidden")),
            ]
        case Experts():
            return _experts(job, mlp)


def _experts(job: Job, mlp: Experts) -> list[Saved]:
    sizes, rows, D = Sizes.of(job), Rows.of(job, mlp), job.model.d_model
    t, a, K, E = sizes.slice_tokens, sizes.stream, mlp.top_k, mlp.experts
    saved = [
        *_norm("mlp", sizes, job.model),
        # The router computes in fp32. If its input and weight are not in fp32, it makes copies.
        Saved("mlp", "router_input", t * D * FP32),
        Saved("mlp", "scores", t * E * FP32),
        *([] if job.expert_choice else [Saved("moe", "experts", t * K * INT64)]),
        *_dispatch(job, mlp, rows),
        Saved("moe", "rows", rows.received * D * a),
        *(Saved("moe", name, rows.received * mlp.hidden * a) for name in ("gate", "up", "hidden")),
        Saved("moe", "outputs", rows.sent * D * a),
        Saved("moe", "weights", t * rows.candidates * FP32),
    ]
    if a != FP32:
        saved.append(Saved("mlp", "router_weight", E * D * FP32))
    if K > 1 and not job.expert_choice:
        saved += [Saved("mlp", "top", t * K * FP32), Saved("mlp", "top_sum", t * FP32)]
    if job.aux_loss:
        saved += [Saved("mlp", "score_sum", t * FP32), Saved("mlp", "share", sizes.batch * E * FP32)]
    if job.z_loss:
        saved += [Saved("mlp", "logits", t * E * FP32), Saved("mlp", "log_sum_exp", t * FP32)]
    if mlp.shared_hidden:
        if a != FP32:
            saved.append(Saved("mlp", "shared_input", t * D * a))
        saved += [
            Saved("mlp", f"shared_{name}", t * mlp.shared_hidden * a) for name in ("gate", "up", "hidden")
        ]
    return saved


def _dispatch(job: Job, mlp: Experts, rows: Rows) -> list[Saved]:
    """The storages of a dispatch plan (`engine.parallel.expert_all_to_all.Dispatch`): for each candidate its row, and
    whether it is kept; for each row its token; and the ends of the experts' rows."""
    candidates = Sizes.of(job).slice_tokens * rows.candidates
    saved = [
        Saved("moe", "rows_of_pairs", candidates * INT64),
        # With a limit, an additional row at the end stands for all candidates that are not kept.
        Saved("moe", "tokens", (rows.sent + rows.limited) * INT64),
        Saved("moe", "offsets", mlp.experts / job.grid.ep * 4),
        *_orders(job, rows),
    ]
    if rows.limited:
        saved.append(Saved("moe", "keep", candidates * BOOL))
    if rows.limited and job.grid.ep == 1:
        saved.append(Saved("moe", "ends", mlp.experts * INT64))
    return saved


def _orders(job: Job, rows: Rows) -> list[Saved]:
    """For each hop of the all-to-all, the permutation that sorts the received rows, and its inverse. An all-to-all over
    ep has one hop, or two if `ep_inner` divides ep into groups: first within the groups, then between them."""
    hops = 0 if job.grid.ep == 1 else 2 if job.ep_inner and 1 < job.ep_inner < job.grid.ep else 1
    return [Saved("moe", "orders", hops * 2 * rows.received * INT64)] if hops else []


def _routing(job: Job, mlp: Experts) -> list[Saved]:
    """The storages that hold a layer's routing decisions, which the recomputed forward pass uses again
    (`engine.model.moe.moe_layer.Routing`)."""
    sizes, rows = Sizes.of(job), Rows.of(job, mlp)
    # If experts choose tokens, one list of all experts is the candidates of every token.
    candidates = mlp.experts if job.expert_choice else sizes.slice_tokens * mlp.top_k
    saved = [
        Saved("moe", "experts", candidates * INT64),
        Saved("moe", "load", (mlp.experts + 1) * INT64),
        *_dispatch(job, mlp, rows),
    ]
    if job.aux_loss:
        # The counts of a sequence's pairs are reused where a capacity by probability has counted them in int64.
        width = INT64 if job.router_scores else FP32
        saved.append(Saved("moe", "share", sizes.batch * mlp.experts * width))
    return saved
