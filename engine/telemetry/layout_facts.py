"""Facts about a run's layout that each rank sends in its hello message. Torch-free."""

from agents.protocol import Value
from engine.config.layout import Layout
from engine.config.learning_rate import decay_steps
from engine.planner.workload.parameters import active, total
from engine.planner.workload.transformer import Transformer


def layout_facts(layout: Layout) -> dict[str, Value]:
    """Constant facts about the run that follow from its layout. For a model whose code the user supplies, the number of
    parameters is None, because that code is not loaded here."""
    model, train = layout.model, layout.train
    transformer = None if model.own else Transformer.of(model)
    return {
        "params": total(transformer) if transformer else None,
        "active_params": active(transformer) if transformer else None,
        "layers": model.layers,
        "d_model": model.d_model,
        "seq_len": model.seq_len,
        "experts": model.moe.experts if model.moe else 0,
        "top_k": model.moe.top_k if model.moe else 0,
        "schedule": layout.schedule.name,
        "zero": train.zero,
        "steps": train.steps,
        "global_batch": train.global_batch,
        "checkpoint_every": layout.checkpoint.every,  # above 0: the end of the run is also saved
        "optimizer": train.optimizer,
        "lr": train.lr,
        "warmup": train.warmup,
        "lr_schedule": train.lr_schedule,
        "lr_end": train.lr_end,
        "decay": decay_steps(train) if train.lr_schedule == "wsd" else None,
        "precision": train.precision,
        "data": layout.data.source,
    }
