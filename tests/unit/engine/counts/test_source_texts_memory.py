"""Recomputes the parameter, memory and FLOP counts in the source documents.

The source documents are four documents on distributed training from which this project began. Text A is "Training
doesn't fail because of FLOPs", text B is "Parallel processing fundamentals", text C is "03 - Parallelism and
Efficiency", and text D is the guide that covers the roofline. "D 8.2" means section 8.2 of text D, and "A 01" means
section 01 of text A. RIGHT lists the numbers that agree with the planner. WRONG lists the numbers that differ from the
planner's, each with the correct number and the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import pytest

from engine.config.grid import Grid
from engine.planner.memory.peak import LayerBytes, saved_of_stage
from engine.planner.memory.plan import plan_memory
from engine.planner.memory.state import state_of
from engine.planner.workload.flops import token_flops
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import active, by_part, rank_parameters, total
from engine.planner.workload.transformer import Experts, LatentAttention, Transformer
from tests.unit.engine.counts import published_models as models

GB = 1e9
LLAMA_13B = models.llama(40, 5120, 40, 40, 13824, 32000)
LLAMA_33B = models.llama(60, 6656, 52, 52, 17920, 32000)
LLAMA_65B = models.llama(80, 8192, 64, 64, 22016, 32000)
GPT2_XL = models.gpt(48, 1600, 25, 50257, 1024)
BERT_LARGE = 340e6  # parameters as in the source documents; the planner cannot describe an encoder
SEVEN, SEVENTY, GPT3, PALM = 7e9, 70e9, 175e9, 540e9


def bytes_per_parameter(zero: int, ranks: int, gradients: str = "bf16", precision: str = "bf16") -> float:
    """Bytes of model state on a rank for each parameter of the whole model."""
    model = models.LLAMA2_7B
    job = Job(
        model,
        2048,
        ranks,
        1,
        Grid(dp_shard=ranks),
        zero=zero,
        gradients=gradients,
        precision=precision,  # type: ignore[arg-type]
    )
    state = state_of(job, 0, rank_parameters(job, 0))
    return (state.parameters + state.gradients + state.optimizer) / total(model)


def gpt3_sample() -> float:
    """Bytes of activations of GPT-3 for 2,048 tokens on one rank, without recompute, with unfused attention and
    dropout."""
    job = Job(models.GPT3, 2048, 1, 1, Grid(), fused_attention=False, dropout=True)
    kept = saved_of_stage(LayerBytes(job), 0)
    return kept["attention"] + kept["mlp"]


@dataclass(frozen=True)
class Number:
    """A number in a source document: its section, its value, the planner's value, and a relative tolerance that allows
    for the document's rounding."""

    where: str
    said: float
    counted: Callable[[], float]
    within: float = 0.01


STATE = bytes_per_parameter
RIGHT = [
    # Text A, section 01, and text C, section "Why parallelism is required"
    Number("A 01: weights of 70B in bf16, GB", 140, lambda: 2 * SEVENTY / GB),
    Number(
        "A 01: Adam's state brings 70B north of 700 GB (weights 2, moments 8)", 700, lambda: 10 * SEVENTY / GB
    ),
    Number("A 05: Mixtral 8x7B has 47B parameters", 47e9, lambda: total(models.MIXTRAL_8X7B)),
    Number("A 05: and uses 13B for a token", 13e9, lambda: active(models.MIXTRAL_8X7B)),
    Number("B: parameters of 405B in fp16, GB", 810, lambda: 2 * total(models.LLAMA3_405B) / GB),
    Number("B exercise: 70B in fp16, GB", 140, lambda: 2 * SEVENTY / GB),
    Number(
        "C: a 70B dense model has 70B active", 1, lambda: active(models.LLAMA2_70B) / total(models.LLAMA2_70B)
    ),
    Number("C: bf16 takes half of fp32", 0.5, lambda: 2 / 4),
    # D, section 1.2
    Number("D 1.2: bytes a parameter, mixed precision with Adam", 16, lambda: STATE(0, 1), 1e-6),
    Number("D 1.2: LLaMA-7B, GB", 112, lambda: STATE(0, 1) * SEVEN / GB),
    Number("D 1.2: LLaMA-13B, GB", 208, lambda: STATE(0, 1) * 13e9 / GB),
    Number("D 1.2: LLaMA-65B, GB", 1040, lambda: STATE(0, 1) * 65e9 / GB),
    Number("D 1.2: GPT-3, GB", 2800, lambda: STATE(0, 1) * GPT3 / GB),
    Number("D 1.2: PaLM, GB", 8640, lambda: STATE(0, 1) * PALM / GB),
    Number("D 1.2: 80 GB devices for LLaMA-7B", 2, lambda: ceil(STATE(0, 1) * SEVEN / 80 / GB)),
    Number("D 1.2: for LLaMA-13B", 3, lambda: ceil(STATE(0, 1) * 13e9 / 80 / GB)),
    Number("D 1.2: for LLaMA-65B", 13, lambda: ceil(STATE(0, 1) * 65e9 / 80 / GB)),
    Number("D 1.2: for GPT-3", 35, lambda: ceil(STATE(0, 1) * GPT3 / 80 / GB)),
    Number("D 1.2: for PaLM", 108, lambda: ceil(STATE(0, 1) * PALM / 80 / GB)),
    Number("D 1.2: activations of a GPT-3 sample, GB", 275, lambda: gpt3_sample() / GB, 0.002),
    Number("D 1.2 figure: 7B parameters, GB", 14, lambda: 2 * SEVEN / GB),
    Number("D 1.2 figure: 7B optimizer alone, GB", 84, lambda: 12 * SEVEN / GB),
    Number("D 6.2: CCR of GPT-3, batch 1, by 6 N", 3072, lambda: 6 * GPT3 * 2048 / (2 * GPT3 * 2), 1e-9),
    Number("D 7.4: gradients of Llama-7B all-reduced, fp32, GB", 56, lambda: 2 * SEVEN * 4 / GB),
    Number("D 7.4: bf16, GB", 28, lambda: 2 * SEVEN * 2 / GB),
    Number("D 7.4: Llama-70B, fp32, GB", 560, lambda: 2 * SEVENTY * 4 / GB),
    Number("D 7.4: Llama-70B, bf16, GB", 280, lambda: 2 * SEVENTY * 2 / GB),
    Number("D 7.4: GPT-2 XL, fp32, GB (1.56B)", 12, lambda: 2 * total(GPT2_XL) * 4 / GB, 0.05),
    Number("D 7.4: GPT-2 XL, bf16, GB", 6, lambda: 2 * total(GPT2_XL) * 2 / GB, 0.05),
    Number("D 7.4: BERT-Large, fp32, GB", 2.7, lambda: 2 * BERT_LARGE * 4 / GB),
    Number("D 7.4: BERT-Large, bf16, GB", 1.4, lambda: 2 * BERT_LARGE * 2 / GB, 0.03),
    Number("D 7.4: fp32 Adam, bytes a parameter", 16, lambda: STATE(0, 1, precision="fp32"), 1e-6),
    Number("D 7.4: mixed precision, 18 with fp32 gradients", 18, lambda: STATE(0, 1, "fp32"), 1e-6),
    # Text D, section 8.2: the 12 N bytes of the optimizer are sharded over P ranks
    Number("D 8.2: ZeRO-1 shards 12 N", 12 / 8, lambda: STATE(1, 8) - 4, 1e-3),
    Number("D 8.2: ZeRO-2 shards 2 N more", 14 / 8, lambda: STATE(2, 8) - 2, 1e-3),
    Number("D 8.2: ZeRO-3 shards all", 1 / 8, lambda: STATE(3, 8) / STATE(0, 8), 1e-3),
    Number("D 8.2 figure: parameters of 7B in fp16, GB", 14, lambda: 2 * SEVEN / GB),
    Number("D 8.2 figure: gradients of 7B over 8 ranks, GB", 1.75, lambda: 2 * SEVEN / 8 / GB),
    # D, section 12
    Number("D 12.1: GPT-3", 175e9, lambda: total(models.GPT3)),
    Number(
        "D 12.1: gradients of a stage, 175B over 8, in bf16, GB", 44, lambda: 2 * total(models.GPT3) / 8 / GB
    ),
    Number("D 12.2: LLaMA-7B", 6.7e9, lambda: total(models.LLAMA2_7B)),
    Number("D 12.2: LLaMA-13B", 13e9, lambda: total(LLAMA_13B)),
    Number("D 12.2: LLaMA-33B", 32.5e9, lambda: total(LLAMA_33B)),
    Number("D 12.2: LLaMA-65B", 65.2e9, lambda: total(LLAMA_65B)),
    Number("D 12.2: LLaMA-2 70B", 70e9, lambda: total(models.LLAMA2_70B), 0.02),
    Number("D 12.3: Mixtral total", 46.7e9, lambda: total(models.MIXTRAL_8X7B), 1e-3),
    Number("D 12.3: Mixtral active", 12.9e9, lambda: active(models.MIXTRAL_8X7B), 2e-3),
    Number("D 12.4: DeepSeek-V2 total", 236e9, lambda: total(models.DEEPSEEK_V2), 2e-3),
    Number("D 12.4: DeepSeek-V2 active", 21e9, lambda: active(models.DEEPSEEK_V2), 0.02),
    Number(
        "D 11.8: top 2 of 8 uses two experts of a layer", 2, lambda: experts_used(models.MIXTRAL_8X7B), 1e-9
    ),
]


def experts_used(model: Transformer) -> float:
    """Number of experts per layer that a token uses, computed from total and active parameters."""
    held = by_part(model)["experts"]
    return 8 * (held - (total(model) - active(model))) / held


@pytest.mark.parametrize("number", RIGHT, ids=lambda number: number.where)
def test_a_number_of_the_source_texts(number: Number) -> None:
    assert number.counted() == pytest.approx(number.said, rel=number.within)


@dataclass(frozen=True)
class Wrong:
    """A wrong number in a source document: its section, its value, the right value, the planner's value, and the reason
    for the difference."""

    where: str
    said: float
    right: float
    counted: Callable[[], float]
    why: str


WRONG = [
    Wrong(
        "C: total training memory of 70B, GB",
        560,
        1120,
        lambda: STATE(0, 1) * SEVENTY / GB,
        "gradients and Adam's state are 7 times the bf16 weights, not 3 to 4 times, and come on top of them",
    ),
    Wrong(
        "C: ZeRO-2 keeps the model only, ZeRO-1 model and gradients: bytes a parameter of 1",
        4,
        5.5,
        lambda: STATE(1, 8),
        "each rank also keeps its shard of the optimizer's state, 12 / P bytes a parameter",
    ),
    Wrong(
        "D 7.4: a 7B model needs 140 GB a device under DDP",
        140,
        112,
        lambda: STATE(0, 1) * SEVEN / GB,
        "20 bytes a parameter; section 1.2 of the same text counts 16 (112 GB), fp32 gradients give 18 (126 GB)",
    ),
    Wrong(
        "D 8.2: DDP takes 4 N + 2 N + 12 N",
        18,
        16,
        lambda: STATE(0, 1),
        "its legend has 2 N of fp16 parameters, and the fp32 weights are among the optimizer's 12 N already",
    ),
    Wrong(
        "D 8.2 figure: DDP of 7B, GB (14 + 14 + 112)",
        140,
        112,
        lambda: STATE(0, 8) * SEVEN / GB,
        "112 GB is 16 N for all state; the optimizer is 12 N = 84 GB",
    ),
    Wrong(
        "D 8.2 figure: ZeRO-1 of 7B on 8 devices, GB",
        42,
        38.5,
        lambda: STATE(1, 8) * SEVEN / GB,
        "the optimizer's shard is 84 / 8 = 10.5 GB, not 112 / 8 = 14",
    ),
    Wrong(
        "D 8.2 figure: ZeRO-2 of 7B on 8 devices, GB",
        30,
        26.25,
        lambda: STATE(2, 8) * SEVEN / GB,
        "as above, 14 + 1.75 + 10.5",
    ),
    Wrong(
        "D 8.2 figure: ZeRO-3 of 7B on 8 devices, GB",
        18,
        14,
        lambda: STATE(3, 8) * SEVEN / GB,
        "as above, 1.75 + 1.75 + 10.5, before gathered weights",
    ),
    Wrong(
        "D 8.4: ZeRO-1 takes 6 N + 12 N / P (P = 8)",
        7.5,
        5.5,
        lambda: STATE(1, 8),
        "fp16 weights and gradients are 4 N; 6 N holds with fp32 gradients, as in Megatron-LM",
    ),
    Wrong(
        "D 8.4: ZeRO-2 takes 4 N + 14 N / P (P = 8)",
        5.75,
        3.75,
        lambda: STATE(2, 8),
        "fp16 weights are 2 N",
    ),
    Wrong(
        "D 8.4: ZeRO-3 takes 18 N / P (P = 8)",
        2.25,
        2.0,
        lambda: STATE(3, 8),
        "16 N / P, as in its section 1.2",
    ),
    Wrong(
        "D 7.4 figure: with 16 N, 80 GB holds 10B parameters at most",
        10,
        5,
        lambda: 80 * GB / STATE(0, 1) / 1e9,
        "80 / 16; its 40 GB limit of 5B is likewise 2.5B",
    ),
    Wrong(
        "D 12.3: Mixtral's experts have 7B each",
        7,
        5.64,
        lambda: by_part(models.MIXTRAL_8X7B)["experts"] / 8 / 1e9,
        "7B is an expert with the attention and the embedding that all share; so 8 x 7B is 46.7B and not 56B",
    ),
    Wrong(
        "D 11.8: 8 times the parameters of a dense model at twice its compute, with top 2",
        8,
        6.45,
        lambda: total(models.MIXTRAL_8X7B) / total(mixtral_with_one_expert()),
        "only the feed-forward parts multiply; attention, norms, embedding and head do not",
    ),
]


def mixtral_with_one_expert() -> Transformer:
    return models.llama(32, 4096, 32, 8, 14336, 32000)


@pytest.mark.parametrize("number", WRONG, ids=lambda number: number.where)
def test_a_wrong_number_of_the_source_texts(number: Wrong) -> None:
    assert number.counted() == pytest.approx(number.right, rel=0.005), number.why
    assert number.said != pytest.approx(number.right, rel=0.05)


def test_configuration_of_deepseek_v2() -> None:
    """The tests' DeepSeek-V2 has the values of the configuration file in section 12.4 of source text D."""
    model = models.DEEPSEEK_V2
    layer = model.layers[-1]
    assert len(model.layers) == 60 and model.d_model == 5120
    assert isinstance(layer.mlp, Experts) and isinstance(layer.mixer, LatentAttention)
    assert layer.mlp.experts == 160 and layer.mlp.top_k == 6
    assert layer.mlp.shared_hidden == 2 * layer.mlp.hidden


def test_activations_of_7b_take_50_to_200_gb() -> None:
    """The 50 to 200 GB of activations in the figure in section 1.2 of source text D are right for 3 to 8 sequences of
    2,048 tokens, without recompute and with unfused attention."""
    job = Job(models.LLAMA2_7B, 2048, 8, 1, Grid(), fused_attention=False)
    one = sum(saved_of_stage(LayerBytes(job), 0).values()) / GB
    assert 50 < 3 * one < 200 and 50 < 8 * one < 200
    fused = sum(saved_of_stage(LayerBytes(replace(job, fused_attention=True)), 0).values()) / GB
    assert fused < 0.8 * one  # text C: fused attention never stores the scores


def test_recompute_saves_what_c_says_and_more() -> None:
    """According to source text C, activation checkpointing saves 60-70 % of the activation memory for 30 % more
    compute. Full recompute costs a third more compute and keeps only the layers' inputs, so the layers' activations
    take 94 % less memory."""
    job = Job(models.LLAMA2_7B, 2048, 8, 1, Grid())
    none, full = (
        sum(
            saved_of_stage(LayerBytes(replace(job, recompute=mode)), 0)[kind]
            for kind in ("attention", "mlp", "input")
        )
        for mode in ("none", "full")
    )
    assert 1 - full / none == pytest.approx(0.94, abs=0.01)


def test_seventy_billion_on_256_devices() -> None:
    """An exercise in source text B has 256 devices of 80 GB and a model of 70B parameters (140 GB in fp16). With TP 2
    the weights fit. TP 2 x PP 4 leaves 32 replicas. Weights, gradients and optimizer state take 16 N / 8 = 140 GB of a
    device without ZeRO, which does not fit, and 38 GB with stage 1."""
    model = models.LLAMA2_70B
    assert ceil(2 * total(model) / (80 * GB)) == 2
    grid = Grid(pp=4, tp=2, dp_shard=32)
    assert grid.world == 256
    job = Job(model, 4096, 512, 1, grid, zero=0, recompute="full", gradients="bf16")
    assert not plan_memory(job).fits(80 * GB)
    assert plan_memory(replace(job, zero=1)).fits(80 * GB)


def test_a_token_takes_six_flops_a_parameter_and_attention() -> None:
    """According to section 6.2 of the roofline guide (text D in this module's docstring), training a model of N
    parameters takes about 6 N FLOPs per token. For GPT-3 this is exact if N counts only the weights of matrix products,
    including those of the output head, and 6 s h is added per layer for causal attention."""
    parts = by_part(models.GPT3)
    matrices = parts["mixer"] + parts["dense"] - 96 * 9 * 12288 + parts["embedding"] - 2048 * 12288
    assert token_flops(models.GPT3, 2048) == 6 * matrices + 6 * 96 * 2048 * 12288
    assert token_flops(models.GPT3, 2048) / (6 * GPT3) == pytest.approx(1.01, abs=0.01)
