"""Tests of layouts, the configuration files of runs: overrides on the command line, and a one-sentence error message
for each mistake."""

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.checks.layout_checks import advice
from engine.config.checks.legal_values import legal_micro_batches
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.toml import from_toml, load
from engine.preflight.memory import memory_refusal

DEMO = Path(__file__).parents[4] / "layouts" / "demo.toml"


def test_the_demo_has_the_documented_sizes() -> None:
    demo = load(DEMO)
    assert demo.ranks.world == 8
    assert (demo.knobs.micro_batches, demo.train.global_batch, demo.model.layers) == (4, 32, 4)
    assert demo.train.precision == "fp32" and demo.knobs.capacity_factor is None
    assert legal_micro_batches(demo, "1f1b") == [2, 4, 8, 16]


def test_overrides_take_precedence_over_the_file() -> None:
    demo = load(
        DEMO, ["train.steps=3", "knobs.capacity_factor=1.5", "train.grad_clip=none", "model.moe.top_k=1"]
    )
    assert (demo.train.steps, demo.knobs.capacity_factor, demo.train.grad_clip) == (3, 1.5, None)
    assert demo.model.moe and demo.model.moe.top_k == 1


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("grid.tp=3", "grid.tp = 3 does not divide model.heads = 4; legal: 1, 2"),
        ("grid.tp=x", "grid.tp = 'x' is not legal; legal: a whole number from 1 to 2147483647"),
        ("grid.cp=0", "grid.cp = 0 is not legal; legal: a whole number from 1"),
        ("grid.ep=3", "grid.ep = 3 does not divide model.moe.experts = 8; legal: 1, 2, 4"),
        ("grid.pp=5", "legal: 1 to 4"),
        ("grid.ep_method=ring", "legal: direct, hierarchical"),
        ("train.stepz=3", "train.stepz is not a key of a layout; did you mean steps?"),
        ("snapshot.every=3", "snapshot is not a key of a layout; did you mean checkpoint?"),
        ("train.zero=9", "train.zero = 9 is not legal; legal: 0, 1, 2, 3"),
        (
            "train.zero=0",
            "grid.dp_shard = 2; legal: 1, 2, 3, or grid.dp_shard = 1 with grid.dp_replicate = 2",
        ),
        ("model.kv_rank=16", "model.kv_rank = 16 requires model.attention = mla; legal: mla, or no kv_rank"),
        (
            "model.attention=mla",
            "model.kv_rank is missing; model.attention = mla requires kv_rank, nope_dim, rope_dim",
        ),
        ("model.head_dim=15", "model.head_dim = 15 is odd; RoPE rotates pairs; legal: an even number"),
        ("model.mtp_layers=17", "legal: a whole number from 0 to 16"),
        ("plan.imbalance=0.5", "legal: a number from 1 to 1000"),
        ("train.precision=fp15", "legal: fp32, bf16"),
        ("grid.dp_replicate=0", "grid.dp_replicate = 0 is not legal; legal: a whole number from 1"),
        (
            "grid.dp_replicate=3",
            "grid.dp_replicate x grid.dp_shard = 6 does not divide train.global_batch = 32",
        ),
        ("train.steps=1.5", "a whole number"),
        ("train.steps=none", "train.steps = none is not legal"),
        ("train.lr=nan", "train.lr"),
        ("train.global_batch=3", "train.global_batch = 3"),
        ("train.global_batch=2", "legal: a multiple of 4"),
        (
            "knobs.micro_batches=7",
            "knobs.micro_batches = 7 does not divide the 16 sequences that train.global_batch = 32 gives each of 2 "
            "data ranks; legal: 2, 4, 8, 16, or train.global_batch a multiple of 14",
        ),
        ("knobs.capacity_factor=-1", "a number from 0.1 to 8 or none"),
        (
            "model.max_seq_len=32",
            "model.seq_len = 64 is longer than model.max_seq_len = 32, the sliding window of some of the model's "
            "layers; legal: 1 to 32",
        ),
        ("model.latent_norm_eps=1e-6", "model.latent_norm_eps = 1e-06 requires model.attention = mla"),
        ("model.d_model=2147483648", "legal: a whole number from 1 to 2147483647"),
        ("model.moe.d_expert=50", "model.moe.d_expert = 50 is not aligned"),
        ("run.name=a/b", "run.name = 'a/b' is not legal"),
        ("run.name=-x", "not beginning with"),
        ("train.lr=inf", "a number from 0 to 1e+09"),
        ("knobs.capacity_factor=0.05", "a number from 0.1 to 8 or none"),
        ("schedule.name=zbh", "legal: gpipe, 1f1b, interleaved, interleaved_zb, zbv, dualpipev"),
        ("model.moe=none", "grid.ep = 4 requires experts"),
        ("model.moe=3", "legal: a section [model.moe]"),
        ("model.moe.top_k=9", "model.moe.top_k = 9 is more than experts"),
        (
            "model.moe.groups=3",
            "model.moe.groups = 3 does not divide model.moe.experts = 8; legal: 1, 2, 4, 8",
        ),
        ("model.moe.top_groups=2", "model.moe.top_groups = 2 is more than groups = 1; legal: 1"),
        ("model.moe.score=relu", "legal: softmax, sigmoid"),
        ("model.moe.balance=both", "legal: aux, bias, aux+bias, none"),
        ("model.moe.route_scale=0", "model.moe.route_scale = 0 is not legal; legal: a number above 0"),
        (
            "model.moe.dense_layers=4",
            "model.moe.dense_layers = 4 leaves no layer of model.layers = 4 for experts; legal: 0 to 3, or model.moe",
        ),
        ("model.moe.dense_layers=1 model.d_ff=255", "grid.tp = 2 does not divide model.d_ff = 255"),
        ("model.moe.drop=random", "legal: position, probability"),
        ("model.moe.router=expert_choice", "model.moe.balance = aux cannot be combined with"),
        ("knobs.bias_rate=2", "a number from 0 to 1"),
        ("knobs.z_loss_coef=-1", "a number from 0 to 100"),
        ("data.source=hello", "legal: stdlib, text:GLOB"),
        ("schedule.name=interleaved grid.pp=1", "needs a pipeline, but grid.pp = 1; legal: gpipe, 1f1b"),
        (
            "schedule.name=interleaved grid.pp=4",
            "grid.pp = 4 x 2 virtual stages of schedule.name = interleaved",
        ),
        (
            "schedule.name=interleaved schedule.virtual_stages=1",
            "does not suit schedule.name = interleaved; legal: at least 2",
        ),
        (
            "schedule.virtual_stages=2",
            "schedule.virtual_stages = 2 does not suit schedule.name = 1f1b; legal: 1",
        ),
        (
            "schedule.name=zbv train.zero=3",
            "split backward of schedule.name = zbv needs again; legal: 1, 2",
        ),
        ("schedule.name=dualpipev knobs.recompute=full", "would recompute a layer for each of its weights"),
        ("schedule.virtual_stages=0", "legal: a whole number from 1 to 1024"),
        ("schedule.name=zbv schedule.virtual_stages=3", "does not suit schedule.name = zbv; legal: 2"),
        (
            "schedule.name=dualpipev knobs.micro_batches=2",
            "knobs.micro_batches = 2 does not suit schedule.name = dualpipev over 4 stages; legal: 4, 8, 16",
        ),
        ("schedule.name=dualpipev train.global_batch=4", "too few for 4 stages; legal: a multiple of 8"),
        ("nonsense", "write section.key=value"),
        ("run=3", "write section.key=value"),
        ("grid.tp.x=3", "is not a key of a layout"),
    ],
)
def test_a_wrong_value_gets_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(LayoutError) as refusal:
        load(DEMO, override.split())
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "ways"),
    [
        ("grid.tp=3", ["grid.tp=1", "grid.tp=2"]),
        ("model.seq_len=65", ["grid.tp=1", "model.seq_len=2"]),
        ("model.layers=1", ["grid.pp=1", "model.layers=2"]),
        ("model.heads=3", ["model.heads=2"]),
        ("model.heads=8 model.d_model=36", ["model.d_model=16"]),
        ("grid.dp_shard=64", ["grid.dp_shard=1", "grid.dp_shard=8", "train.global_batch=256"]),
        ("grid.ep=3", ["grid.ep=1", "grid.ep=4"]),
        (
            "train.global_batch=30",
            [*(f"knobs.micro_batches={n}" for n in (3, 5, 15)), "train.global_batch=8"],
        ),
        ("schedule.name=zbv model.layers=3", ["model.layers=4"]),
    ],
)
def test_values_that_a_refusal_calls_legal_are_accepted(override: str, ways: list[str]) -> None:
    """Checks that the error message names the key of each alternative in `ways`, and that each alternative makes the
    layout legal."""
    overrides = ["grid.ep=1", "knobs.micro_batches=2", *override.split()]
    with pytest.raises(LayoutError) as refusal:
        load(DEMO, overrides)
    for way in ways:
        assert way.partition("=")[0] in str(refusal.value)
        load(DEMO, [*overrides, way])


def test_a_warm_up_past_the_last_step_is_a_warning() -> None:
    """The demo's warm-up is 40 steps, and a shorter run of the demo must be legal."""
    message = (
        "train.warmup = 40 is longer than train.steps = 20: the learning rate does not reach train.lr = 0.002"
    )
    assert list(advice(load(DEMO, ["train.steps=20"]))) == [message]
    assert not list(advice(load(DEMO, ["train.steps=40"])))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["grid.dp_shard=2147483647"], "tp of [grid] = 8,589,934,588 is larger than in any published run; "
                                       "legal: up to 65,536"),
        ([f"grid.{axis}=2147483647" for axis in ("pp", "dp_shard", "cp", "tp", "ep")], "legal: up to 65,536"),
        (["train.global_batch=2147483647"], "train.global_batch x model.seq_len = 137,438,953,408 is larger"),
        (["model.seq_len=2147483647"], "train.global_batch x model.seq_len = 68,719,476,704 is larger"),
        (["model.d_model=2147483644"], "the number of the model's parameters = "),
        (["model.moe.d_expert=2147483647"], "parameters = 13,194,139,"),
        (["model.layers=2147483647"], "model.layers = 2147483647 is not legal; legal: a whole number from 1 to 1024"),
        (["model.moe.experts=2147483647"], "legal: a whole number from 1 to 65536"),
        (["model.vocab=1000000000000"], "legal: a whole number from 1 to 2147483647"),
        (["train.steps=1000000000000"], "legal: a whole number from 1 to 2147483647"),
    ],
)  # fmt: skip
def test_absurd_sizes_get_one_sentence_at_once(overrides: list[str], sentence: str) -> None:
    with pytest.raises(LayoutError) as refusal:
        load(DEMO, overrides)
    assert sentence in str(refusal.value) and len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["grid.dp_shard=8192", "train.global_batch=65536"], "the layout has 32768 ranks, but this machine's memory is 16 GiB, enough for at most 512"),  # noqa: E501
        (["model.vocab=268435456"], "the model's 34,360,"),
        # 6 GiB of state in total, but each of the 32 ranks gathers a quarter of the weights and sums gradients for it
        (["model.vocab=3145728", "grid.dp_shard=8", "train.zero=1"], "take at least 29 GiB with gradients"),
    ],
)  # fmt: skip
def test_a_run_too_large_for_this_machine_is_refused(
    overrides: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16 * 2**30))
    monkeypatch.setattr("engine.preflight.memory.sees_gpu", lambda: False)
    assert memory_refusal(load(DEMO)) is None
    assert sentence in (memory_refusal(load(DEMO, overrides)) or "")


def test_a_hierarchical_all_to_all_needs_two_levels() -> None:
    two_hops = "grid.ep_method=hierarchical"
    assert load(DEMO, [two_hops]).ep_inner == 2
    with pytest.raises(LayoutError, match=r"grid.ep_inner = 3 requires grid.ep_method = hierarchical; legal"):
        load(DEMO, ["grid.ep_inner=3"])
    with pytest.raises(
        LayoutError, match=r"hierarchical cannot split grid.ep = 2 into two levels; legal: direct"
    ):
        load(DEMO, [two_hops, "grid.ep=2"])
    for inner in (1, 3, 4):
        with pytest.raises(
            LayoutError, match=f"grid.ep_inner = {inner} does not split grid.ep = 4 .* legal: 2$"
        ):
            load(DEMO, [two_hops, f"grid.ep_inner={inner}"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["model.moe.groups=4", "model.moe.top_groups=1", "model.moe.top_k=3"],
            "more than the experts of 1 groups; legal: 1 to 2",
        ),
        (["model.moe.groups=4", "model.moe.top_groups=5"], "legal: 1 to 4"),
        (["model.moe.router=expert_choice", "model.moe.balance=bias"], "legal: none"),
        (
            ["model.moe.router=expert_choice", "model.moe.balance=none", "model.moe.drop=probability"],
            "legal: position",
        ),
        (["model.moe.router=expert_choice", "model.moe.balance=none", "model.moe.groups=2"], "legal: 1"),
    ],
)
def test_incompatible_routing_keys_get_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(LayoutError) as refusal:
        load(DEMO, overrides)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.moe.groups=4", "model.moe.top_groups=2", "model.moe.top_k=4"],
        ["model.moe.groups=4", "model.moe.balance=bias", "model.moe.score=sigmoid"],
        ["model.moe.router=expert_choice", "model.moe.balance=none"],
        # Legal without a capacity factor, because an operator may set it later.
        ["model.moe.drop=probability"],
        ["model.moe.shared_experts=3"],
        ["model.moe.balance=aux+bias", "model.moe.dense_layers=3", "model.moe.route_scale=2.5"],
    ],
)
def test_compatible_routing_keys_are_accepted(overrides: list[str]) -> None:
    assert load(DEMO, overrides).model.moe


def test_none_is_a_value_of_a_choice_that_lists_it() -> None:
    demo = load(DEMO, ["knobs.recompute=none", "model.moe.balance=none", "knobs.capacity_factor=none"])
    assert demo.knobs.recompute == "none" and demo.model.moe and demo.model.moe.balance == "none"
    assert demo.knobs.capacity_factor is None


def test_files_that_are_not_layouts(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="No such file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(LayoutError, match=r"bad\.toml is not TOML"):
        load(tmp_path / "bad.toml")
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LayoutError, match="not UTF-8"):
        load(tmp_path / "raw.toml")
    with pytest.raises(LayoutError, match="model is missing"):
        from_toml("")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"run.seed = {'9' * 5000}", "x.toml is not TOML: it has a number with thousands of digits"),
        (f"run = {'[' * 5000}", "x.toml is not TOML: it is nested too deeply"),
        (f"run = {'{a=' * 5000}", "x.toml is not TOML: it is nested too deeply"),
        ('run.dir = "a\\u0000b"', "run.dir = 'a\\x00b' is not legal; legal: 1 to 4,096 characters"),
        ('run.name = "demo\\n"', "run.name = 'demo\\n' is not legal"),
        ('checkpoint.dir = ""', "checkpoint.dir = '' is not legal"),
        ('data.source = "text:\\u001b[2J"', "data.source = 'text:\\x1b[2J' is not legal"),
        (f'"{"x" * 10**6}" = 3', "is not a key of a layout; legal: "),
        ('"a\\n\\u001b[31mb" = 3', "a  [31mb is not a key of a layout"),
        (f'run.name = "{"x" * 10**6}"', "is not legal; legal: up to 64"),
        (f"run = {list(range(10**5))}", "is not legal; legal: a section [run]"),
    ],
    ids=range(11),
)
def test_a_malicious_layout_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    model = "model = {layers = 1, d_model = 4, heads = 1, seq_len = 8}"
    (tmp_path / "x.toml").write_text(f"{model}\n{text}\n")
    with pytest.raises(LayoutError) as refusal:
        load(tmp_path / "x.toml")
    message = str(refusal.value)
    assert sentence in message and message.isprintable() and len(message) <= 1100


@pytest.mark.parametrize(
    "override",
    [
        "x" * 10**6,
        f"run.seed={'9' * 5000}",
        f"run.seed={'[' * 5000}",
        f"run.{'a.' * 10**5}b=1",
        "run.dir=\0",
    ],
    ids=["no equals sign", "digits", "brackets", "dots", "NUL"],
)
def test_a_malicious_override_gets_one_sentence(override: str) -> None:
    with pytest.raises(LayoutError) as refusal:
        load(DEMO, [override])
    assert str(refusal.value).isprintable() and len(str(refusal.value)) <= 1100


def test_a_layout_that_is_not_a_regular_file_gets_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(LayoutError, match=f"cannot read the layout {path}: not a regular file"):
            load(path)
    with pytest.raises(LayoutError, match="not a legal file name"):
        load("a\0b")
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(LayoutError, match="larger than 1,048,576 bytes"):
        load(tmp_path / "large")


KEYS = [
    "model.layers",
    "grid.tp",
    "train.lr",
    "knobs.recompute",
    "model.moe",
    "data.source",
    "x.y",
    "grid",
    "",
]


@given(st.sampled_from(KEYS), st.one_of(st.text(max_size=12), st.integers().map(str), st.floats().map(str)))
def test_any_override_is_accepted_or_refused_in_one_sentence(key: str, value: str) -> None:
    try:
        assert isinstance(load(DEMO, [f"{key}={value}"]), Layout)
    except LayoutError as refusal:
        assert "\n" not in str(refusal)


def test_the_digest_depends_on_model_and_data_not_on_steps() -> None:
    digest = load(DEMO).digest()
    assert load(DEMO, ["train.steps=3", "run.name=other"]).digest() == digest
    assert load(DEMO, ["run.seed=2"]).digest() != digest
    assert load(DEMO, ["model.layers=6"]).digest() != digest


def test_layouts_are_frozen() -> None:
    with pytest.raises(AttributeError):
        load(DEMO).run.name = "x"  # type: ignore[misc]
    assert msgspec.structs.replace(load(DEMO).run, name="y").name == "y"
