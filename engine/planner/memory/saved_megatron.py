"""Lists the tensors that Megatron-LM keeps, for one layer, between the layer's forward and backward passes.

For a GPT layer with unfused attention and dropout, the sizes add up to s b h (34 + 5 a s / h) bytes (Korthikanti et al.
2022, arXiv 2205.05198, equations 1, 2, 4 and 6). Tensor and sequence parallelism divide these sizes by t. With
selective recompute, 34 s b h / t bytes remain. Fused attention keeps the log-sum-exp of the scores instead of the
scores. With sequence parallelism, each rank saves its slice of the input of a matmul and gathers the input again in the
backward pass (section 4.2.2 of that paper).
"""

from engine.config.sections.assumptions import Module
from engine.planner.memory.saved import Kind, Saved
from engine.planner.memory.sizes import FP32, INT64, MASK, Rows, Sizes
from engine.planner.workload.job import Job
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

RECOMPUTED: dict[Module, tuple[str, ...]] = {  # tensors that are not kept if the module is recomputed
    "norm": ("input", "kv_input", "q_input", "shared_input"),
    "latent": ("qkv",),
    "activation": ("hidden",),
}


def saved_of_layer(job: Job, layer: Layer) -> list[Saved]:
    """Tensors that a layer saves under the job's recompute mode. Mode `full` keeps only the layer's input (2 s b h
    bytes, section 5 of the paper by Korthikanti et al.); `selective` omits the scores, the softmax and the dropout of
    attention (equation 6)."""
    sizes = Sizes.of(job)
    if job.recompute == "full":
        return [Saved("input", "input", sizes.slice_tokens * job.model.d_model * sizes.stream)]
    saved = _mixer_block(job, layer.mixer) + _mlp_block(job, layer.mlp)
    latent = isinstance(layer.mixer, LatentAttention)
    again = {name for module in job.recomputed if module != "latent" or latent for name in RECOMPUTED[module]}
    return [entry for entry in saved if entry.name not in again]


def saved_of_embedding(job: Job) -> list[Saved]:
    """Token ids, and the mask of the dropout after the embedding (Korthikanti et al. 2022, section 4.3)."""
    sizes = Sizes.of(job)
    saved = [Saved("input", "ids", sizes.tokens * INT64)]
    if job.dropout:
        saved.append(Saved("input", "dropout", sizes.slice_tokens * job.model.d_model * MASK))
    return saved


def saved_of_head(job: Job) -> list[Saved]:
    """Inputs of the last norm and of the head, and the fp32 softmax that the loss keeps; in total
    4 s b h / t (1 + v / h) bytes (Korthikanti et al. 2022, section 4.3)."""
    sizes, model = Sizes.of(job), job.model
    slice_ = sizes.slice_tokens * model.d_model * sizes.stream
    return [
        Saved("logits", "norm_input", slice_),
        Saved("logits", "head_input", slice_),
        Saved("logits", "softmax", sizes.tokens * model.vocab / sizes.tp * FP32),
    ]


def saved_of_prediction(job: Job) -> list[Saved]:
    """What a module of multi-token prediction saves before its layer: the token ids of its embedding, the inputs of the
    norms of hidden state and embedding, and the joined input of its projection."""
    sizes = Sizes.of(job)
    slice_ = sizes.slice_tokens * job.model.d_model
    return [
        *saved_of_embedding(job),
        Saved("input", "norm_inputs", 2 * slice_ * sizes.stream),
        Saved("input", "joined", 2 * slice_ * sizes.operand),
    ]


def _block(kind: Kind, job: Job, saved: list[Saved]) -> list[Saved]:
    """Add to `saved` the input of the block's norm, and the mask of the dropout that precedes the residual sum."""
    sizes, D = Sizes.of(job), job.model.d_model
    saved = [Saved(kind, "norm_input", sizes.slice_tokens * D * sizes.stream), *saved]
    if job.dropout:
        saved.append(Saved(kind, "dropout", sizes.slice_tokens * D * MASK))
    return saved


def _mixer_block(job: Job, mixer: Mixer | None) -> list[Saved]:
    sizes, D = Sizes.of(job), job.model.d_model
    t, T, o, a, tp = sizes.slice_tokens, sizes.tokens, sizes.operand, sizes.stream, sizes.tp
    match mixer:
        case None:
            return []
        case Attention():
            C = mixer.head_dim
            kv = max(1.0, mixer.kv_heads / tp)
            out = mixer.heads / tp * C
            core = _attention_core(job, mixer.heads / tp, out + 2 * kv * C, out)
            normalised = [Saved("attention", "qk_norm", T * (mixer.heads / tp + kv) * C * a)]
            return _block(
                "attention",
                job,
                [
                    Saved("attention", "input", t * D * o),
                    *(normalised if mixer.qk_norm else []),
                    *core,
                    Saved("attention", "projected", T * out * o),
                ],
            )
        case LatentAttention():
            q = mixer.heads / tp * (mixer.nope_dim + mixer.rope_dim)
            out = mixer.heads / tp * mixer.v_dim
            latent = [  # each latent is saved before its norm, and again as the input of its up-projection
                Saved("attention", "kv_latent", t * (mixer.kv_rank + mixer.rope_dim) * a),
                Saved("attention", "kv_input", t * mixer.kv_rank * o),
            ]
            if mixer.q_rank:
                latent += [
                    Saved("attention", "q_latent", t * mixer.q_rank * a),
                    Saved("attention", "q_input", t * mixer.q_rank * o),
                ]
            core = _attention_core(job, mixer.heads / tp, 2 * q + out, out)
            projected = Saved("attention", "projected", T * out * o)
            return _block(
                "attention", job, [Saved("attention", "input", t * D * o), *latent, *core, projected]
            )
        case StateSpace():
            inner, BC = mixer.heads * mixer.head_dim / tp, 2 * mixer.groups * mixer.state / tp
            return _block(
                "attention",
                job,
                [
                    Saved("attention", "input", t * D * o),
                    Saved("attention", "zxBCdt", T * (2 * inner + BC + mixer.heads / tp) * a),
                    Saved("attention", "scanned", T * inner * a),
                    Saved("attention", "projected", T * inner * o),
                ],
            )


def _attention_core(job: Job, heads: float, qkv: float, out: float) -> list[Saved]:
    """Queries, keys and values and, except under selective recompute, either the scores or the tensors that a fused
    kernel keeps: the log-sum-exp and the kernel's output. The output is counted here only if the output projection
    saves a quantised copy of it; otherwise the output is the saved input of this projection, which the caller counts.
    `qkv` and `out` are element counts per token."""
    sizes = Sizes.of(job)
    T, a = sizes.tokens, sizes.stream
    saved = [Saved("attention", "qkv", T * qkv * a)]
    if job.recompute == "selective":
        return saved
    if job.fused_attention:
        if sizes.operand != a:  # the input of the projection is a quantised copy of the output
            saved.append(Saved("attention", "out", T * out * a))
        return [*saved, Saved("attention", "log_sum_exp", T * heads * FP32)]
    scores = T * heads * sizes.seq_len
    saved.append(Saved("attention", "softmax", scores * a))
    if job.dropout:
        saved += [
            Saved("attention", "score_mask", scores * MASK),
            Saved("attention", "score_dropout", scores * a),
        ]
    return saved


def _mlp_block(job: Job, mlp: FeedForward | None) -> list[Saved]:
    sizes = Sizes.of(job)
    match mlp:
        case None:
            return []
        case Dense():
            input_ = Saved("mlp", "input", sizes.slice_tokens * job.model.d_model * sizes.operand)
            return _block(
                "mlp", job, [input_, *_mlp(job, "mlp", sizes.tokens, mlp.hidden / sizes.tp, mlp.gated)]
            )
        case Experts():
            return _block("mlp", job, _experts(job, mlp))


def _mlp(job: Job, kind: Kind, tokens: float, hidden: float, gated: bool) -> list[Saved]:
    """Input and output of the activation function; a gated activation has two inputs. If the output is recomputed, the
    input is kept in the precision of the matmuls (DeepSeek-V3, arXiv 2412.19437, section 3.3.3)."""
    sizes = Sizes.of(job)
    width = sizes.operand if "activation" in job.recomputed else sizes.stream
    return [
        Saved(kind, "activation_input", (2 if gated else 1) * tokens * hidden * width),
        Saved(kind, "hidden", tokens * hidden * sizes.operand),
    ]


def _experts(job: Job, mlp: Experts) -> list[Saved]:
    """Tensors of the router, the permutation and the experts of Megatron-Core with grouped matmuls. The routing weights
    scale the activations instead of the experts' outputs, so the outputs are not kept."""
    sizes, rows = Sizes.of(job), Rows.of(job, mlp)
    t, D, E = sizes.slice_tokens, job.model.d_model, mlp.experts
    width = mlp.latent or D
    saved = [
        Saved("mlp", "input", t * D * sizes.stream),
        Saved("mlp", "router", 2 * t * E * FP32),  # logits and scores
        Saved("moe", "permutation", 2 * rows.sent * INT64),
        Saved("moe", "rows", rows.received * width * sizes.operand),
        *_mlp(job, "moe", rows.received, mlp.hidden / job.etp, mlp.gated),
    ]
    if mlp.latent:
        saved.append(Saved("mlp", "latent", t * 2 * width * sizes.operand))
    if mlp.shared_hidden:
        if sizes.operand != sizes.stream:
            saved.append(Saved("mlp", "shared_input", t * D * sizes.operand))
        saved += _mlp(job, "mlp", sizes.tokens, mlp.shared_hidden / sizes.tp, mlp.gated)
    return saved
