"""The adapters with the real transformers and accelerate in this process, without a hub: the operations that a rank
reports, fp16 overflows, and tokens. `tests/ranks/adapters` runs whole jobs."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from accelerate import Accelerator, ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import agents
from agents.alerts.training import Loss
from agents.loop.adapters.accelerate import axes_of, watch
from agents.loop.adapters.huggingface import CockpitCallback
from agents.loop.adapters.torch_ranks import TorchRanks, coordinates_of, own_part
from agents.protocol import Event, Summary
from agents.state.run_state import RunState
from tests.unit.agents.loop.test_loop import Sent

pytestmark = pytest.mark.exhaustive  # importing the libraries takes seconds
OVERFLOWS = 3  # the update in which a gradient overflows


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The loops that adapters have joined, and the messages that each has sent."""
    found: list[Any] = []
    join = agents.join

    def noting(*args: Any, **kwargs: Any) -> Any:
        loop = join(*args, **kwargs | {"hub": "none"})
        found.append((loop, Sent(loop)))
        return loop

    monkeypatch.setattr("agents.join", noting, raising=False)
    return found


class Sequences(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    """Sequences of 8 tokens, of which the last ones are padding: no token in sequence 0, one in sequence 1, ..."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, mask = torch.arange(8) + 1, torch.arange(8) < 8 - index % 4
        labels = torch.where(mask, tokens, -100)
        return {"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": labels}


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))


def use_fp16(accelerator: Any) -> None:
    """Scale losses as on a GPU with fp16. On a CPU, Accelerate has no scaler."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"


class Overflowing(Trainer):  # type: ignore[misc]
    updates = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.updates += 1
        if self.updates == OVERFLOWS:
            next(self.model.parameters()).grad.fill_(math.inf)
        return loss


def alerts(sent: Sent) -> list[str]:
    state, detector = RunState(), Loss()
    for summary in sent.of(Summary):
        state.apply(summary)
    return [finding.name for finding in detector.check(state, 0.0) or []]


def test_an_fp16_overflow_in_accelerate_is_an_event_and_no_alert(joined: list[Any], tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    use_fp16(accelerator)
    weight = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(torch.ones(6, 1))
    held_out = torch.utils.data.DataLoader(torch.ones(2, 1))
    module, optimizer, loader, held_out = accelerator.prepare(
        weight, torch.optim.SGD(weight.parameters(), lr=0.1), loader, held_out
    )
    watch(accelerator)
    (loop, sent), doing = joined[0], []
    for number, batch in enumerate(loader, 1):
        doing.append(loop.doing[1])
        accelerator.backward(module(batch).square().sum() * (math.inf if number == OVERFLOWS else 1.0))
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        doing.append(loop.doing[1])
        if number == 2:
            module.eval()
            for one in held_out:
                module(one)
                doing.append(loop.doing[1])
            module.train()
    accelerator.end_training()
    assert doing == 2 * ["step", "between steps"] + 2 * ["evaluation"] + 4 * ["step", "between steps"]
    summaries = sent.of(Summary)
    assert [one.step for one in summaries] == [1, 2, 3, 4, 5, 6]
    assert [one.skipped for one in summaries] == [False, False, True, False, False, False]
    assert [one.loss_scale for one in summaries] == 3 * [1024.0] + 3 * [512.0]
    assert [event.text for event in sent.of(Event) if event.level == "warning"] == [
        "step 3: a gradient overflowed in fp16 at loss scale 1024, so the scaler skipped the update"
    ]


def test_a_loop_that_trains_a_model_in_eval_mode_reports_its_steps(joined: list[Any], tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    weight = torch.nn.Linear(1, 1).eval()  # as `from_pretrained` of transformers returns models
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    module, optimizer, loader = accelerator.prepare(
        weight, optimizer, torch.utils.data.DataLoader(torch.ones(3, 1))
    )
    watch(accelerator)
    for batch in loader:
        accelerator.backward(module(batch).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert [one.step for one in joined[0][1].of(Summary)] == [1, 2, 3]


@pytest.mark.parametrize("counted", ["no", "non_padding"])
def test_trainer_reports_its_evaluations_overflows_and_tokens(
    counted: str, joined: list[Any], tmp_path: Path
) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=5,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        include_num_input_tokens_seen=counted,
        optim="sgd",
    )
    trainer = Overflowing(model=model(), args=arguments, train_dataset=Sequences(), eval_dataset=Sequences())
    doing: dict[str, set[str]] = {}

    def noting(name: str) -> None:
        original = getattr(trainer, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            doing.setdefault(name, set()).add(joined[0][0].doing[1])
            return original(*args, **kwargs)

        setattr(trainer, name, noted)

    noting("prediction_step")
    noting("_save_optimizer_and_scheduler")
    use_fp16(trainer.accelerator)
    trainer.add_callback(CockpitCallback(trainer))
    trainer.train()
    sent = joined[0][1]
    assert doing == {"prediction_step": {"evaluation"}, "_save_optimizer_and_scheduler": {"checkpoint"}}
    summaries = sent.of(Summary)
    assert [one.skipped for one in summaries] == [False, False, True, False, False]
    assert math.isfinite(summaries[2].loss) and not math.isfinite(summaries[2].grad_norm)
    assert alerts(sent) == []
    assert "overflowed in fp16 at loss scale 1024" in next(
        event.text for event in sent.of(Event) if event.level == "warning"
    )
    tokens = round(sum(one.tokens_per_s * one.step_ms / 1e3 for one in summaries))
    assert tokens == (5 * 4 * 8 if counted == "no" else trainer.state.num_input_tokens_seen)


def test_axes_of_accelerate_are_those_of_its_device_mesh() -> None:
    class Of:
        parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=2)

    ranks = object.__new__(TorchRanks)
    ranks.world = 16
    mesh = torch.arange(16).view(2, 2, 2, 2)  # as `init_device_mesh` with Accelerate's shape
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    for ranks.rank in range(16):
        place = (mesh == ranks.rank).nonzero()[0].tolist()
        assert axes_of(Of, ranks) == dict(zip(names, place, strict=True))
    ranks.world, ranks.rank = 4, 3
    assert axes_of(object(), ranks) == {"dp": 3}
    assert coordinates_of(5, {"dp": 3, "sp": 1, "tp": 2}) == {"dp": 2, "tp": 1}
    assert [own_part(10, 4, at) for at in range(4)] == [2, 2, 3, 3]


def test_lightning_reports_its_validation_checkpoint_and_pauses(joined: list[Any], tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from agents.loop.adapters.lightning import cockpit_callback

    doing: dict[str, set[str]] = {}

    def note(name: str) -> None:
        if joined:
            doing.setdefault(name, set()).add(joined[0][0].doing[1])

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            note("training_step")
            rates.append(self.optimizers().param_groups[0]["lr"])
            return self.layer(batch).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            note("validation_step")

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            note("save")

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                loop = joined[0][0]
                loop._board.commit(1, {"lr_scale": 0.5}, loop._board.prepare({"lr_scale": 0.5}))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Loading(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            note("data")
            return torch.ones(1)

    rates: list[float] = []
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        val_check_interval=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[cockpit_callback()],
    )
    data = torch.utils.data.DataLoader(Loading())
    trainer.fit(Module(), data, torch.utils.data.DataLoader(torch.ones(2, 1)))
    assert doing["validation_step"] == {"evaluation"} and doing["save"] == {"checkpoint"}
    assert doing["training_step"] == {"forward"} and "between steps" in doing["data"]
    assert [one.lr for one in joined[0][1].of(Summary)] == pytest.approx([0.1, 0.1, 0.05, 0.05])
    assert rates == [0.1] * 4, "the module sees its own rates"


TITAN = """
import sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import torchtitan.tools.utils as utils
utils.device_type, utils.device_module = "cpu", torch.cpu
from torchtitan.distributed.parallel_dims import ParallelDims
from agents.loop.adapters.torchtitan import _axes

dist.init_process_group("fake", rank=22, world_size=32, store=FakeStore())
for backend in ("partial_dtensor", "full_dtensor", "spmd_types"):
    sizes = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "pp": 2}
    dims = ParallelDims(**sizes, ep=1, world_size=32, spmd_backend=backend)
    dims.build_mesh()
    own = _axes(dims, SimpleNamespace(rank=22))
    for axis in ("pp", "dp_replicate", "cp", "tp"):
        assert own[axis] == dims.get_mesh(axis).get_local_rank(), (backend, axis, own)
    assert own["dp_replicate"] * 2 + own["dp_shard"] == dims.get_mesh("batch").get_local_rank()
    assert dims.non_data_parallel_size == 8
"""


def test_axes_of_torchtitan_are_those_of_its_meshes() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    pytest.importorskip("triton", reason="triton is not installed, which torchtitan imports")
    done = subprocess.run([sys.executable, "-c", TITAN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
