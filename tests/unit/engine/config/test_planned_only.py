"""Layouts that only the planner supports: the errors of `engine run`, parameter and FLOP counts, and digests."""

from dataclasses import replace

import pytest

from engine.config.checks.trainable import UNTRAINED, untrained
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.sections.assumptions import MODULES
from engine.config.sizes import parameter_count
from engine.config.toml import from_toml, load, to_toml
from engine.planner.hardware.table import hardware
from engine.planner.layer_split import layer_weight
from engine.planner.what_if import what_if
from engine.planner.workload.flops import layer_flops
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import active, total
from engine.planner.workload.transformer import Transformer
from tests.ranks.cases.over_models import MINIS
from tests.unit.engine.config.test_layout import DEMO

MLA = ["attention=mla", "kv_heads=none", "q_rank=24", "kv_rank=16", "nope_dim=16", "rope_dim=8", "v_dim=12"]


def demo(*keys: str) -> Layout:
    return load(DEMO, [key if key.startswith("train") else f"model.{key}" for key in keys])


CASES = [
    (["activation=gelu"], "model.activation = gelu: an MLP without gate can be"),
    (["norm=layernorm"], "model.norm = layernorm: LayerNorm can be"),
    (["positions=learned"], "model.positions = learned: a learned position embedding can be"),
    (["train.precision=fp8"], "train.precision = fp8: fp8 training needs torchao and the scaled matrix "
     "products of a GPU of compute capability 8.9"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "says"), CASES)
def test_run_refuses_in_one_sentence(keys: list[str], says: str) -> None:
    assert (untrained(demo(*keys)) or "").startswith(says)


def test_further_predictions_are_not_trained_with_a_split_backward() -> None:
    zbv = load(DEMO, ["model.mtp_layers=1", "grid.pp=2", "schedule.name=zbv", "model.layers=4"])
    says = "model.mtp_layers = 1: multi-token prediction is not trained with the split backward of schedule.name = zbv"
    assert (untrained(zbv) or "").startswith(says)


def test_every_planned_key_is_refused_by_a_case() -> None:
    cases = {says.partition(" = ")[0] for _, says in CASES}
    assert cases == set(UNTRAINED)


@pytest.mark.parametrize("name", ["demo", "deepseek-mini", "dense-1b", "moe-1b", *MINIS])
def test_trained_layouts_are_not_refused(name: str) -> None:
    assert untrained(load(DEMO.with_name(f"{name}.toml"))) is None
    assert untrained(load(DEMO.with_name(f"{name}.toml"), ["train.precision=bf16"])) is None


TRAINED = [
    ["head_dim=32"],
    ["mtp_layers=1"],
    ["window=16"],
    ["qk_norm=true"],
    MLA,
    ["qkv_bias=true"],
    ["bias=true"],
]
EVERY = [*TRAINED, *(keys for keys, _ in CASES)]


@pytest.mark.parametrize("keys", TRAINED)
def test_model_parts_that_are_trained(keys: list[str]) -> None:
    assert untrained(demo(*keys)) is None


DIGESTS = {  # digests from before the keys for the planner were added
    "demo": "6f0f672ef0979e6a",
    "dense-1b": "1e0f5700c7084133",
    "moe-1b": "6c49455a8aa41d24",
    "deepseek-mini": "8a009699fc1bcfaf",
}


@pytest.mark.parametrize(("name", "digest"), DIGESTS.items())
def test_digests_of_older_layouts_stay(name: str, digest: str) -> None:
    assert load(DEMO.with_name(f"{name}.toml")).digest() == digest


def test_digests_tell_planned_models_apart() -> None:
    layouts = [demo(), *(demo(*keys) for keys in EVERY if not keys[0].startswith("train"))]
    assert len({layout.digest() for layout in layouts}) == len(layouts)
    assert demo().digest() == load(DEMO, ["hardware.name=H100", "plan.framework=megatron"]).digest()


@pytest.mark.parametrize("keys", EVERY)
def test_the_whole_layout_is_read_back(keys: list[str]) -> None:
    assert from_toml(to_toml(demo(*keys))) == demo(*keys)


@pytest.mark.parametrize("moe", [[], ["moe=none", "d_ff=96"]])
@pytest.mark.parametrize("keys", EVERY)
def test_both_counts_agree(keys: list[str], moe: list[str]) -> None:
    overrides = [key if key.startswith("train") else f"model.{key}" for key in [*keys, *moe]]
    model = load(DEMO, [*overrides, *(["grid.ep=1"] if moe else [])]).model
    counted = Transformer.of(model)
    assert total(counted) == parameter_count(model)
    assert active(counted) == parameter_count(model, active=True)
    # The layer split weighs layers by the multiply-adds of forward: half the FLOPs.
    assert 2 * layer_weight(model, 0) == layer_flops(counted, counted.layers[0], model.seq_len)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([*MLA, "heads=4", "kv_heads=2"], "model.kv_heads = 2 requires model.attention = gqa; legal: gqa, or"),
        ([*MLA, "head_dim=16"], "model.head_dim = 16 requires model.attention = gqa"),
        ([*MLA, "window=16"], "model.window = 16 requires model.attention = gqa"),
        ([*MLA, "qk_norm=true"], "model.qk_norm = true requires model.attention = gqa"),
        ([*MLA, "rope_dim=7"], "model.rope_dim = 7 is odd; RoPE rotates pairs; legal: an even number"),
        ([*MLA, "v_dim=none"], "model.v_dim is missing; model.attention = mla requires kv_rank"),
        (["d_model=60", "heads=4"], "model.d_model / model.heads = 15 is odd"),
    ],
)  # fmt: skip
def test_bad_models(keys: list[str], says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        demo(*keys)
    assert says in str(caught.value)


def test_one_machine() -> None:
    with pytest.raises(LayoutError, match="both given; legal: one of them"):
        load(DEMO, ["hardware.name=H100", "hardware.path=own.toml"])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["plan.recomputed=norm+mlp"], "plan.recomputed = norm+mlp is not legal; legal: norm, latent, activation"),
        (["plan.recomputed=norm"], "plan.recomputed = norm requires plan.framework = megatron and knobs.recompute"),
        (["plan.recomputed=norm", "plan.framework=megatron", "knobs.recompute=full"], "knobs.recompute = none; legal"),
    ],
)  # fmt: skip
def test_bad_assumptions(keys: list[str], says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        load(DEMO, keys)
    assert says in str(caught.value)


def test_what_is_computed_again_frees_memory_and_costs_time() -> None:
    base = Job.of(load(DEMO, [*(f"model.{key}" for key in MLA), "plan.framework=megatron"]))
    none, all_ = what_if(base, hardware("H100")), what_if(replace(base, recomputed=MODULES), hardware("H100"))
    assert none.time and all_.time and none.time.phases["recompute"] == 0 < all_.time.phases["recompute"]
    kept = [found.memory.ranks[0].activations + found.memory.ranks[0].moe for found in (none, all_)]
    assert kept[1] < kept[0]
    for module in MODULES:
        one = what_if(replace(base, recomputed=(module,)), hardware("H100"))
        assert kept[1] < one.memory.ranks[0].activations + one.memory.ranks[0].moe < kept[0]
