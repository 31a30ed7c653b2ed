"""Converts the rows of the published tables into jobs whose step time the planner predicts, with one function for each
source."""

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config.grid import Grid
from engine.planner.timing.release import releases
from engine.planner.workload.flops import token_flops
from engine.planner.workload.job import Job
from engine.planner.workload.transformer import Transformer
from tests.bench.published import models
from tests.bench.published.recipes import RECIPE_SPLITS, recipe

TABLES = Path(__file__).with_name("tables")
PRECISIONS = {"BF16": "bf16", "NVFP4": "nvfp4", "MXFP8": "fp8", "FP8": "fp8"}


@dataclass(frozen=True)
class Row:
    """One measured layout. If `job` is None, the planner cannot predict the step time of this row, and `note` gives the
    reason. `layouts` identifies the workload: rows in which it is equal have the same source, release, model, GPUs,
    batch, sequence length and precision, and differ only in the layout."""

    source: str
    model: str
    gpu: str
    release: str
    measured: float
    job: Job | None
    note: str = ""

    @property
    def generation(self) -> str:
        return {"A100": "A100", "H100": "Hopper", "H200": "Hopper", "H800": "Hopper"}.get(
            re.split("[-/]", self.gpu)[0], "Blackwell"
        )

    @property
    def routed(self) -> bool:
        """Whether the model has experts."""
        assert self.job
        return self.job.model.routed

    @property
    def kind(self) -> str:
        return "routed" if self.routed else "dense"

    @property
    def layouts(self) -> tuple[Any, ...]:
        assert self.job
        job = self.job
        return (
            self.source,
            self.release,
            self.gpu,
            job.model,
            job.grid.world,
            job.global_batch,
            job.seq_len,
            job.precision,
        )


def read(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def whole(text: str | None, default: int = 1) -> int:
    """The integer at the start of a table cell's text; `default` if the text does not start with a digit."""
    match = re.match(r"\d+", text or "")
    return int(match.group()) if match else default


def split(layers: int, stages: int) -> tuple[int, ...]:
    """Number of layers of each stage. If the number of layers is not divisible by `stages`, the embedding and the loss
    count as one layer each (as with NeMo's `account_for_embedding_in_pipeline_split` and
    `account_for_loss_in_pipeline_split`), and the first stages get the remainder.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers, stages) in RECIPE_SPLITS:
        return RECIPE_SPLITS[layers, stages]
    slots = layers + 2
    sizes = [slots // stages + (stage < slots % stages) for stage in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return tuple(sizes)


def megatron(
    model: Transformer,
    gpus: int,
    batch: int,
    micro: int,
    seq: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    vp: int = 1,
    **more: Any,
) -> Job:
    """A job of Megatron-LM or of a framework that is based on it."""
    dp = gpus // (tp * pp * cp)
    vp = vp if pp > 1 else 1
    return Job(
        model=model, seq_len=seq, global_batch=batch, micro_batch=micro,
        grid=Grid(pp=pp, dp_shard=dp, cp=cp, tp=tp, ep=ep),
        schedule="interleaved" if vp > 1 else "1f1b", virtual_stages=vp, split=split(len(model.layers), pp * vp),
        **({"zero": 1} | more),
    )  # fmt: skip


def vtrain(name: str) -> Iterator[Row]:
    """Megatron-DeepSpeed on A100 (vTrain, data/README.md). Runs on several nodes use full recompute; runs on one node
    use no recompute. The eight GPUs of a node share a bandwidth of 800 Gb/s to other nodes (`inter_node_bandwidth` in
    vTrain's config/validation)."""
    multi = name == "vtrain_multi"
    for row in read(name):
        sizes = [int(row[key]) for key in ("# layers", "hidden size", "attention heads", "sequence length")]
        tp, pp = int(row["tensor parallelism"]), int(row["pipeline parallelism"])
        job = megatron(
            models.gpt(*sizes[:3], 51200, sizes[3]), int(row["# GPUs"]), int(row["global batch"]),
            int(row["micro batch"]), sizes[3], tp=tp, pp=pp, zero=0, recompute="full" if multi else "none",
            sequence_parallel=False, fused_attention=False,
        )  # fmt: skip
        label = f"{sizes[0]}x{sizes[1]}"
        yield Row(
            name,
            label,
            "A100-80/ib-hdr-shared",
            "megatron-deepspeed",
            float(row["iteration time (ms)"]) / 1e3,
            job,
        )


SC21 = """
24 2304 24 1 1 32 512 137
30 3072 32 2 1 64 512 138
36 4096 32 4 1 128 512 142
40 6144 48 8 1 256 1024 135
48 8192 64 8 2 512 1536 138
"""  # layers, hidden, heads, tp, pp, GPUs, batch, TFLOP/s a GPU (arXiv 2104.04473, table 1)
SC21_MICRO_BATCH = 4  # assumed, because the table does not give it; section 5.4.2 finds 1 to 4 best
KORTHIKANTI = """
48 6144 64 8 1 1 4 4 1.42
96 12288 96 8 8 3 64 1 18.13
105 20480 128 8 35 3 280 1 49.05
128 25600 160 8 64 1 512 1 94.42
"""  # layers, hidden, heads, tp, pp, vp, batch, micro-batch, seconds (arXiv 2205.05198, table 5)
MEGATRON_2021 = {"sequence_parallel": False, "fused_attention": False, "recompute": "full", "zero": 0}


def sc21(name: str) -> Iterator[Row]:
    """The step time is computed from the published TFLOP/s and equation 3 of the paper, which counts the FLOPs of
    recomputation and attention without a causal mask."""
    for line in SC21.split("\n")[1:-1]:
        layers, width, heads, tp, pp, gpus, batch, rate = map(int, line.split())
        model = models.gpt(layers, width, heads, 51200, 2048)
        flops = 96 * batch * 2048 * layers * width**2 * (1 + 2048 / 6 / width + 51200 / 16 / layers / width)
        job = megatron(
            model, gpus, batch, SC21_MICRO_BATCH, 2048, tp=tp, pp=pp, vp=2 if pp > 1 else 1, **MEGATRON_2021
        )
        yield Row(name, f"{layers}x{width}", "A100-80", "megatron-2021", flops / gpus / rate / 1e12, job)


def korthikanti(name: str) -> Iterator[Row]:
    for line in KORTHIKANTI.split("\n")[1:-1]:
        *sizes, seconds = line.split()
        layers, width, heads, tp, pp, vp, batch, micro = map(int, sizes)
        model = models.gpt(layers, width, heads, 51200, 2048)
        job = megatron(model, tp * pp, batch, micro, 2048, tp=tp, pp=pp, vp=vp, **MEGATRON_2021)
        yield Row(name, f"{layers}x{width}", "A100-80", "megatron-2021", float(seconds), job)


def llm_foundry(name: str) -> Iterator[Row]:
    """FSDP runs of LLM Foundry. The step time is computed from tokens per second. Gradients are reduced in bf16 in mode
    PURE, else in fp32."""
    for row in read(name):
        seq, gpus, batch = int(row["SeqLen (T)"]), int(row["# GPUs"]), int(row["GlobalBatchSize"])
        gpu, memory = row["GPU"].upper().split("_")
        network = "/roce-100" if "800 Gbps" in row["section"] else ""
        job = Job(
            model=models.mpt(row["Model"], seq), seq_len=seq, global_batch=batch,
            micro_batch=int(row["MicroBatchSize"]), grid=Grid(dp_shard=gpus),
            precision="fp8" if row["Precision"] == "amp_fp8" else "bf16",
            recompute="full" if row["Activation Checkpointing"] == "True" else "none",
            zero=2 if row["Sharding Strategy"] == "SHARD_GRAD_OP" else 3, framework="engine",
        )  # fmt: skip
        release = "llm-foundry-pure" if row["MP Mode"] == "PURE" else "llm-foundry"
        release = "llm-foundry-h100" if gpu == "H100" else release
        seconds = batch * seq / float(row["Throughput (T/s)"])
        machine = "H100" if gpu == "H100" else f"{gpu}-{memory[:-2]}{network}"
        yield Row(name, "mpt-" + row["Model"], machine, release, seconds, job)


def nearest(release: str) -> str:
    """`release` itself if `releases()` contains it; else the latest earlier release of the same framework there, or the
    framework's first release if none is earlier."""
    family = sorted(name for name in releases() if name.split("-")[0] == release.split("-")[0])
    return max((name for name in family if name <= release), default=family[0])


def without_model(source: str, row: dict[str, str], release: str, seconds: float) -> Row | None:
    """If models.py does not have the row's model, a `Row` without a job, whose note gives the reason; otherwise
    None."""
    name = row["model"]
    if models.find(name) is None:
        reason = models.NO_MODEL.get(name, "the sizes of its model are not in models.py")
        return Row(source, name, row.get("gpu", "H100"), release, seconds, None, reason)
    return None


def cut(model: Transformer, layers: int) -> Transformer:
    """The model with only its first `layers` layers."""
    return model if layers == len(model.layers) else replace(model, layers=model.layers[:layers])


def dgxc(name: str) -> Iterator[Row]:
    for row in read(name):
        if unknown := without_model(name, row, nearest(row["src"]), float(row["step_s"])):
            yield unknown
            continue
        model = cut(models.model(row["model"]), int(row["layers"]))
        tp, ep = int(row["tp"]), whole(row["ep"])
        # Up to release 25.02, tensor parallelism splits an expert like a dense layer unless the recipe sets etp.
        etp = whole(row["etp"], tp) if row["ep"] else 1
        job = megatron(
            model, int(row["gpus"]), int(row["gbs"]), int(row["mbs"]), int(row["seq"]), tp=tp, pp=int(row["pp"]),
            cp=int(row["cp"]), ep=ep, vp=whole(row["vp"]), etp=etp, precision=row["prec"], **_capacity(row["model"]),
        )  # fmt: skip
        yield Row(name, row["model"], row["gpu"], nearest(row["src"]), float(row["step_s"]), job, row["note"])


def _capacity(model: str) -> dict[str, Any]:
    return {"capacity_factor": 1.0} if model.startswith("grok") else {}


def bridge(name: str) -> Iterator[Row]:
    """Runs of Megatron-Bridge. If a cell has two values, the first is used, which is for FP8 with per-tensor scales;
    the second is for MXFP8. Rows of release 25.09 do not state the precision; FP8 is assumed."""
    for row in read(name):
        model, gpus, seq = row["model"], int(row["gpus"]), int(row["seq"])
        seconds = int(row["gbs"]) * seq / gpus / whole(row["tok_s_gpu"])
        release = nearest(f"bridge-{row['release']}")
        if unknown := without_model(name, row, release, seconds):
            yield unknown
            continue
        lora = row["task"] == "lora"
        job = megatron(
            models.model(model), gpus, int(row["gbs"]), int(row["mbs"]), seq, tp=whole(row["tp"]), pp=whole(row["pp"]),
            cp=whole(row["cp"]), ep=whole(row["ep"]), vp=whole(row["vp"]), zero=3 if whole(row["fsdp"], 0) else 1,
            precision=PRECISIONS.get(row["precision"].split("-")[0].split(" ")[0], "fp8"), adapters=lora,
            **recipe(model, row["gpu"], row["release"], row["precision"]),
        )  # fmt: skip
        yield Row(name, model, row["gpu"], release, seconds, job, row["task"])


def automodel(name: str) -> Iterator[Row]:
    """FSDP2 runs of NeMo AutoModel. In runs with a pipeline, each gradient accumulation step fills and drains the
    pipeline."""
    for row in read(name):
        if unknown := without_model(name, row, "automodel", float(row["step_s"])):
            yield unknown
            continue
        gpus, pp, micro = int(row["gpus"]), int(row["pp"]), int(row["mbs"])
        flushes = int(row["ga"]) if pp > 1 else 1
        model = models.model(row["model"])
        job = megatron(
            model, gpus, int(row["gbs"]) // flushes, micro, int(row["seq"]), pp=pp, ep=int(row["ep"]),
            vp=whole(row["vp"]), recompute="full", zero=3 if pp == 1 else 2, framework="engine",
            deduplicated=True,
        )  # fmt: skip
        yield Row(name, row["model"], "H100", "automodel", float(row["step_s"]) / flushes, job)


def mcore_moe(name: str) -> Iterator[Row]:
    for row in read(name):
        gpus, batch, seq = int(row["gpus"]), int(row["gbs"]), int(row["seq"])
        seconds = batch * seq / gpus / float(row["tok_s_gpu"])
        if unknown := without_model(name, row, "mcore-moe", seconds):
            yield unknown
            continue
        pp = int(row["pp"].split("|")[-1])  # a cell says 4|8; the recipe of this layout has 8
        job = megatron(
            models.model(row["model"]), gpus, batch, int(row["mbs"]), seq, tp=int(row["tp"]), pp=pp,
            cp=int(row["cp"]), ep=int(row["ep"]), vp=whole(row["vpp"]),
            precision="bf16" if row["prec"] == "bf16" else "fp8", overlap_experts=True,
            deduplicated=True, graphs=("mixer", "router"),
        )  # fmt: skip
        yield Row(name, row["model"], row["gpu"], "mcore-moe", seconds, job)


def mpf(name: str) -> Iterator[Row]:
    """Runs with a global batch of 256 sequences of 4096 tokens and a micro-batch size of 1. The published MFU counts
    attention without a causal mask, as Megatron-LM did in 2025. Runs with an `fsdp` method shard weights. Tensor
    parallelism shards experts like dense layers, except in rows with the method `folding`."""
    for row in read(name):
        method, gpus, tp, pp = row["method"], int(row["gpus"]), int(row["tp"]), whole(row["pp"])
        model, ep = models.model(row["model"]), whole(row["ep"])
        seconds = (
            256 * 4096 * token_flops(model, 4096, causal=False) / gpus / 989.5e12 / (float(row["mfu"]) / 100)
        )
        etp = tp if method != "folding" and ep * tp <= gpus // pp else 1
        job = megatron(
            model,
            gpus,
            256,
            1,
            4096,
            tp=tp,
            pp=pp,
            ep=ep,
            etp=etp,
            zero=3 if method.startswith("fsdp") else 1,
        )
        yield Row(name, row["model"], "H100", "mpf", seconds, job, method)


def kempner(name: str) -> Iterator[Row]:
    """Runs of torch FSDP2 with torch.compile on nodes with four H200 GPUs."""
    for row in read(name):
        micro, tp, seq = int(row["mbs"]), int(row["tp"]), int(row["seq"])
        gpus = int(row["gpus"])
        job = Job(
            model=models.KEMPNER[row["model"]], seq_len=seq, global_batch=micro * int(row["ga"]) * (gpus // tp),
            micro_batch=micro, grid=Grid(dp_shard=gpus // tp, tp=tp), zero=3, recompute="full",
            framework="engine",
        )  # fmt: skip
        yield Row(name, row["model"], "H200-x4", "kempnerforge", float(row["step_s"]), job)


def mlperf(name: str) -> Iterator[Row]:
    for row in read(name):
        job = megatron(
            models.LLAMA3_405B, int(row["gpus"]), int(row["gbs"]), int(row["mbs"]), int(row["seq"]), tp=int(row["tp"]),
            pp=int(row["pp"]), cp=int(row["cp"]), vp=int(row["vp"]), precision="fp8",
        )  # fmt: skip
        yield Row(name, "llama3.1-405b", row["gpu"], "mlperf-5.0", float(row["median_step_s"]), job)


def deepseek(name: str) -> Iterator[Row]:
    """DeepSeek-V3 on 2048 H800 (arXiv 2505.09343, table 4; 2412.19437, section 3): pp 16, ep 64, no tp, DualPipe, fp8,
    a batch of 15360 sequences of 4096 tokens. The micro-batch is one sequence."""
    job = Job(
        model=models.DEEPSEEK_V3_MTP, seq_len=4096, global_batch=15360, micro_batch=1,
        grid=Grid(pp=16, dp_shard=128, ep=64), schedule="dualpipev", virtual_stages=2, split=split(61, 32),
        precision="fp8", zero=1, overlap_experts=True, deduplicated=True,
    )  # fmt: skip
    yield Row(name, "deepseek-v3", "H800", "deepseek-v3", 19.93, job)


READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    "vtrain_multi": vtrain,
    "vtrain_single": vtrain,
    "sc21": sc21,
    "korthikanti": korthikanti,
    "llm_foundry": llm_foundry,
    "dgxc": dgxc,
    "megatron_bridge": bridge,
    "automodel_h100_bf16": automodel,
    "mcore_moe_paper": mcore_moe,
    "mpf_table3": mpf,
    "kempner_h200_bf16": kempner,
    "mlperf_v5.0_llama31_405b": mlperf,
    "deepseek_v3_h800": deepseek,
}


def rows() -> list[Row]:
    """All published rows."""
    return [row for name, reader in READERS.items() for row in reader(name)]
