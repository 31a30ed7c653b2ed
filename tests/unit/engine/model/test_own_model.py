"""The interface for the user's own model: loading, error messages, initial values, planning and knobs. The cases in
tests/ranks/cases whose names begin with `gpt` train a user's own model."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.cli.main import main
from engine.config.checks.supported import EVERYTHING
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.refusal import LayoutError, RefusedError
from engine.config.relayout import relaid
from engine.config.toml import from_toml, load
from engine.control.relayout import Relayout
from engine.launch import rank_main
from engine.launch.run import run_layout
from engine.metering.meter import Meter
from engine.model.dry_run import check_own_model, parameters_of
from engine.model.interface import Block, Implementation, Parts, implementation_of
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.initial_values import initial_values
from engine.parallel.parameters import ParameterFactory
from engine.planner.workload.job import Job
from engine.rendezvous import single_rank_context
from engine.sampling.settings import sampling_layout
from engine.train.trainer import Trainer
from tests.ranks.cases.over_own_models import GPT, gpt
from tests.ranks.models.gpt import Gpt
from tests.unit.engine.config.test_layout import DEMO

ROOT = Path(__file__).parents[4]
HERE = "tests.unit.engine.model.test_own_model"


def layout(*overrides: str) -> Layout:
    return load(DEMO, gpt(*overrides))


class Wide(nn.Module):
    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.cat((x_BSD, x_BSD), -1)


class Waiting(Block):
    def compute(self, x_BSD: Tensor) -> Tensor:
        return x_BSD * float(x_BSD.sum())


class NoBlock(Gpt):
    def block(self, parts: Parts, layer: int) -> Block:
        return nn.Identity()  # type: ignore[return-value]


class WideNorm(Gpt):
    def norm(self, parts: Parts) -> nn.Module:
        return Wide()


class HostWait(Gpt):
    def block(self, parts: Parts, layer: int) -> Block:
        return Waiting(parts, layer)


class NoHead:
    support, embedding, block, norm = Gpt.support, Gpt.embedding, Gpt.block, Gpt.norm
    std, multiply_adds = Gpt.std, Gpt.multiply_adds


def test_the_page_has_the_whole_example() -> None:
    page = (ROOT / "docs" / "train" / "own_model.md").read_text()
    assert f"```python\n{(ROOT / 'tests/ranks/models/gpt.py').read_text()}```" in page
    toml = page.partition("```toml\n")[2].partition("```")[0]
    check_own_model(from_toml(toml.replace("gpt:Gpt", "tests.ranks.models.gpt:Gpt")))


def test_the_built_in_model_has_the_same_interface() -> None:
    built_in = implementation_of(load(DEMO).model)
    assert isinstance(built_in, Implementation) and isinstance(Gpt(), Implementation)
    assert built_in.support is EVERYTHING


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["grid.tp=2"], "grid.tp = 2 is not supported by model.implementation = tests.ranks.models.gpt:Gpt; legal: 1"),
        (["grid.cp=2"], "grid.cp = 2 is not supported"),
        (["model.qk_norm=true"], "model.qk_norm = true is not read by model.implementation"),
        (["model.tie_embeddings=true"], "model.tie_embeddings = true is not read"),
        (["knobs.recompute=selective"], "knobs.recompute = selective is not supported by model.implementation = "),
        (["train.precision=bf16"], "legal: fp32"),
        (["train.compile=true"], "train.compile = true is not supported"),
        (["data.separate_documents=true"], "data.separate_documents = true is not supported"),
        (["model.implementation=no.such.module:Name"], "cannot be loaded: ModuleNotFoundError"),
        ([f"model.implementation={HERE}:Missing"], "cannot be loaded: AttributeError"),
        ([f"model.implementation={HERE}:NoHead"], "has no head; legal: transformer, or package.module:Name"),
        ([f"model.implementation={HERE}:NoBlock"], "returns a Identity for layers.0; legal: a engine.model.interface"),
        ([f"model.implementation={HERE}:WideNorm"], "norm returns the shape [1, 32, 64] for one sequence; legal: "),
        ([f"model.implementation={HERE}:HostWait"], "fails in layers.0: RuntimeError"),
    ],
)  # fmt: skip
def test_what_a_model_does_not_support_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        check_own_model(layout(*overrides))
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["gpt", "os.path:", ":Gpt", "a b:C", "gpt:Gpt()", "../gpt:Gpt", "gpt:Gpt\n"])
def test_only_an_import_is_legal(name: str) -> None:
    with pytest.raises(LayoutError, match="legal: transformer, or the Python import of your own model"):
        layout(f"model.implementation={json.dumps(name)}")


def test_the_command_line_refuses_with_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", str(DEMO), *gpt("grid.tp=2")])
    assert left.value.code == 2
    says = "grid.tp = 2 is not supported by model.implementation"
    assert capsys.readouterr().err.startswith(says)
    with pytest.raises(LayoutError, match=says):
        run_layout(layout("grid.tp=2"))


def test_a_plan_counts_parameters_and_says_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(DEMO), *gpt("grid.pp=2"), "--json"])
    plan = json.loads(capsys.readouterr().out)
    D, F = 32, 4 * 32
    block = 4 * D * D + 2 * D * F + 4 * D + (3 * D + D + F + D)  # matrices, norms, biases
    assert plan["parts"]["layers.1"] == block
    assert plan["parameters"] == 2 * block + (256 + 32) * D + 2 * D + 256 * D
    assert plan["step_flops"] == 6 * 8 * 32 * (2 * (4 * D * D + D * 32 + 2 * D * F) + 256 * D)
    assert plan["step_s"] is plan["memory"] is plan["bytes"] is None
    assert "unknown" in plan["unknown"]
    with pytest.raises(RefusedError, match="the planner does not know your own model"):
        Job.of(layout())


def test_initial_values_depend_on_name_and_seed() -> None:
    meter = Meter(2, 0)
    factory = ParameterFactory(7, Axis("tp", None, meter), Axis("ep", None, meter))
    stage = Stage(factory, layout().model, range(1, 2), KnobValues(), meter)
    found = dict(stage.named_parameters())
    assert set(found) == {"norm.weight", "norm.bias", "head.weight"} | {
        f"layers.1.{part}.{kind}"
        for part in ("norm1", "norm2", "qkv", "out", "up", "down")
        for kind in ("weight", "bias")
    }
    expected = initial_values("layers.1.down.weight", (32, 128), 0.02 / 4**0.5, 7)
    assert torch.equal(found["layers.1.down.weight"], expected)
    assert bool((found["norm.weight"] == 1).all()) and not found["layers.1.up.bias"].any()


def test_other_peoples_files_and_messages_run_no_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layout from a checkpoint, from a re-layout or from rank 0's message cannot make the engine import the module
    that it names."""
    foreign = layout("model.implementation=foreign_module:Name")
    with pytest.raises(LayoutError, match="is not the built-in model; legal for engine sample: transformer"):
        sampling_layout(foreign, [])
    with pytest.raises(LayoutError, match="cannot change while a run is live"):
        relaid(layout(), "model.implementation=foreign_module:Name")
    context = single_rank_context(tmp_path)
    monkeypatch.setattr(rank_main, "leader_settings", lambda *_: (foreign, tmp_path, None, tmp_path))
    with pytest.raises(RefusedError, match="rank 0 names another model"):
        rank_main.train(context, layout(), SimpleNamespace(), None, *[print] * 4, tmp_path, None, layout())  # type: ignore[arg-type]
    assert "foreign_module" not in sys.modules


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    yield Trainer(layout("train.steps=8"))
    dist.destroy_process_group()


def test_knobs_and_previews_are_those_of_the_model(trainer: Trainer) -> None:
    knobs = {knob.name: knob for knob in trainer.board.states()}
    assert knobs["recompute"].legal.choices == ["none", "full"]
    assert trainer.run() is not None
    assert trainer.steering.previewer
    previewed = trainer.steering.previewer({"micro_batches": 4})
    peak = next(one for one in previewed.estimates if one.quantity == "peak_bytes")
    assert peak.after is None and "does not know your own model" in peak.source
    relayout = Relayout(trainer.layout, torch.device("cpu"), lambda _: None, lambda: False)
    with pytest.raises(ValueError, match=r"grid.tp = 2 is not supported by model.implementation"):
        relayout.knob().cast("grid.tp=2")
    assert trainer.layout.model.implementation == GPT[0].partition("=")[2]
    assert trainer.steering.previewer and sum(parameters_of(trainer.layout.model).values()) == sum(
        p.numel() for p in trainer.stages[0].parameters()
    )
