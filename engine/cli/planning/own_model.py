"""`engine plan` for the user's own model: counts the parameters and FLOPs from the model's code; step time, traffic and
peak memory remain unknown."""

from typing import Any

from engine.config.layout import Layout
from engine.planner.layer_split import split_layers

UNKNOWN = "peak memory, step time and traffic: unknown, because the planner knows only the built-in model"
OPTIMIZER_STATE = {"adamw": 2, "sgd": 0}  # numbers per parameter, 4 bytes each
WORD = 4  # bytes of an fp32 number


def own_plan(layout: Layout) -> dict[str, Any]:
    """The plan of a layout that uses the user's own model; unknown numbers are None. Runs the model's code on the meta
    device. Raises LayoutError if the code fails or does not support the layout."""
    from engine.model.dry_run import check_own_model, parameters_of  # imports torch
    from engine.model.interface import model_flops

    check_own_model(layout)
    model, parts = layout.model, parameters_of(layout.model)
    numbers = 1 + OPTIMIZER_STATE[layout.train.optimizer] + (layout.train.ema is not None)
    stages, end = [], layout.stages - 1
    for number, layers in enumerate(split_layers(model, layout.stages)):
        names = [f"layers.{n}" for n in layers]
        names += ["embedding"] if number == 0 else []
        names += ["norm", "head"] if number == end else []
        parameters = sum(parts[name] for name in names)
        state = WORD * numbers * -(-parameters // layout.ranks.fsdp)
        stages.append(
            {"layers": [layers.start, layers.stop - 1], "parameters": parameters, "state_bytes": state}
        )
    return {
        "implementation": model.implementation,
        "ranks": layout.ranks.world,
        "parameters": sum(parts.values()),
        "parts": parts,
        "stages": stages,
        "step_flops": model_flops(model, layout.train.global_batch * model.seq_len, 0),
        "step_s": None,
        "bytes": None,
        "memory": None,
        "unknown": UNKNOWN,
    }


def own_plan_text(name: str, plan: dict[str, Any]) -> str:
    """The plan as text, with one fact per line."""
    parts, stages = plan["parts"], plan["stages"]
    blocks = [count for part, count in parts.items() if part.startswith("layers.")]
    each = f"{blocks[0]:,} each" if len(set(blocks)) == 1 else f"{min(blocks):,} to {max(blocks):,}"
    flops = "unknown" if plan["step_flops"] is None else f"{plan['step_flops'] / 1e12:.3g} TFLOP"
    lines = [
        f"{name}: {plan['implementation']} on {plan['ranks']} rank{'s' * (plan['ranks'] > 1)}",
        f"parameters: {plan['parameters']:,} (embedding {parts['embedding']:,}, {len(blocks)} blocks {each}, "
        f"norm {parts['norm']:,}, head {parts['head']:,})",
        *(
            f"stage {number}: layers {stage['layers'][0]} to {stage['layers'][1]}, {stage['parameters']:,} parameters, "
            f"weights and optimizer state {stage['state_bytes'] / 2**20:,.1f} MiB a rank between steps"
            for number, stage in enumerate(stages)
        ),
        f"model FLOPs of a step: {flops}",
        plan["unknown"],
    ]
    return "\n".join(lines) + "\n"
