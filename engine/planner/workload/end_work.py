"""The operations of embedding, head and multi-token prediction on one rank and for one micro-batch."""

from functools import lru_cache

from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import SUM, Operations
from engine.planner.workload.operations import Collective, Gemm, Memory, Work

# Memory traffic of the loss in bf16 elements per logit, in forward and backward. Fused: logits are cast from bf16 to
# fp32; their maximum, exponentials and sum are computed; the gradient overwrites them. Separate kernels: each of cast,
# maximum, subtraction, exponential, sum and division reads the fp32 logits, and all but maximum and sum write them; in
# backward a multiplication by the gradient of the loss, then a cast (megatron/mpu/cross_entropy.py of Megatron-LM).
FUSED_LOSS = (8, 4)
SEPARATE_LOSS = (19, 7)
# Bytes per weight of an embedding to fill its dense bf16 gradient with zeros (torch's embedding_dense_backward), and to
# read the gradient and add it to an fp32 sum.
EMBEDDING_GRADIENT = 12
LOSS_NUMBERS = 3  # fp32 numbers per token that the tp ranks exchange for the loss


@lru_cache(maxsize=4096)
def head_work(job: Job) -> Work:
    """The operations of the last norm, the head and the loss. The vocabulary is split over tp. The exchange of the loss
    is listed only for the engine; it takes little time."""
    ops, width = Operations(job), job.model.d_model
    ops.norm(ops.slice, width)
    vocab = job.model.vocab / ops.tp
    ops.gather(width, Gemm(ops.tokens, vocab, width))
    ops.gemm(ops.tokens, vocab, width, wide=True)
    forward, backward = FUSED_LOSS if job.fused_attention else SEPARATE_LOSS
    ops.memory(forward * ops.tokens * vocab, backward * ops.tokens * vocab, kernels=8)
    if ops.tp > 1 and job.framework == "engine":
        numbers = LOSS_NUMBERS * ops.tokens * SUM * ops.tp
        ops.forward.append(Collective("tp", "all_gather", numbers, ops.tp))
    return ops.work()


@lru_cache(maxsize=4096)
def embedding_work(job: Job) -> Work:
    """The operations of the embedding: the lookup and, with tp, the reduction over the tp ranks, each of which has a
    part of the vocabulary."""
    ops, width = Operations(job), job.model.d_model
    ops.memory(2 * ops.tokens * width, 4 * ops.tokens * width, kernels=3)
    if job.framework == "megatron" and not job.adapters:
        ops.backward.append(Memory(EMBEDDING_GRADIENT * width * job.model.vocab / ops.tp, 2))
    ops.scatter(width)
    return ops.work()


@lru_cache(maxsize=4096)
def prediction_work(job: Job) -> Work:
    """The operations before a layer of multi-token prediction, which combine the hidden state with the embedding of the
    next token. Megatron-LM splits the projection over tp; in the engine, each tp rank projects its slice of the
    sequence."""
    ops, width = Operations(job), job.model.d_model
    ops.memory(2 * ops.tokens * width, 4 * ops.tokens * width, kernels=3)
    ops.scatter(width)
    ops.norm(ops.slice, width)
    ops.norm(ops.slice, width)
    ops.memory(4 * ops.slice * width, 4 * ops.slice * width)
    if job.framework == "megatron":
        ops.gather(2 * width)
        ops.gemm(ops.tokens, width / ops.tp, 2 * width)
    else:
        ops.gemm(ops.slice, width, 2 * width)
    return ops.work()
