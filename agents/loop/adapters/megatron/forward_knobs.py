"""Knobs for fields of Megatron-LM's `TransformerConfig` that the model reads in each forward pass."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agents.loop.loop import Loop

BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss")  # load balancing with a coefficient
NONE, FULL = "none", "full"


@dataclass(frozen=True)
class ConfigKnob:
    """A numeric field of the configuration that can be a knob. `missing` returns the reason why the
    field cannot be a knob although the run uses it, or "" if it can. `least` and `most`: the legal range, which is
    extended to include the value at launch.
    """

    name: str
    least: float
    most: Callable[[Any], float]
    about: str
    missing: Callable[[Any], str]


def _capacity(config: Any) -> str:
    if config.moe_pad_expert_input_to_capacity:
        return "experts are padded to their capacity, which is fixed at launch"
    flex = config.moe_token_dispatcher_type == "flex"
    return "the flex dispatcher has its own copy" if flex else ""


def _balancing(config: Any) -> str:
    one = config.moe_router_load_balancing_type in BALANCED and isinstance(
        config.moe_aux_loss_coeff, int | float
    )
    return "" if one else "it needs one kind of load balancing with a loss"


KNOBS = (
    ConfigKnob(
        "moe_expert_capacity_factor",
        0.05,
        lambda config: (
            config.num_moe_experts / config.moe_router_topk
        ),  # the capacity is then the number of tokens
        "capacity of each expert, relative to a uniform load",
        _capacity,
    ),
    ConfigKnob(
        "moe_aux_loss_coeff", 0.0, lambda _: 10.0, "coefficient of the load balancing loss", _balancing
    ),
    # Megatron divides the logged loss by the coefficient.
    ConfigKnob("moe_z_loss_coeff", 1e-9, lambda _: 10.0, "coefficient of the router's z-loss", lambda _: ""),
)


def declare_forward_knobs(
    loop: Loop, args: Any, model: Sequence[Any], config: Any, log: Callable[[str], None]
) -> None:
    """Declare a knob for each field in `KNOBS` that is in use, and one for recompute. If a knob cannot be offered, call
    `log` with the reason.
    """
    configs = list(_configs(model, config))
    for knob in KNOBS if config.num_moe_experts else ():
        value = getattr(config, knob.name, None)
        if not value:  # off at launch, so that the model lacks what it needs
            continue
        if why := knob.missing(config):
            log(f"no knob {knob.name}: {why}")
            continue
        loop.knob(
            knob.name,
            float,
            (min(knob.least, value), max(knob.most(config), value)),
            value=float(value),
            apply=partial(_set, configs, knob.name),
            loss_neutral=False,
            about=knob.about,
        )
    _declare_recompute(loop, args, configs, config, log)


def _declare_recompute(
    loop: Loop, args: Any, configs: list[Any], config: Any, log: Callable[[str], None]
) -> None:
    if config.recompute_granularity == "selective" or getattr(args, "use_torch_fsdp2", False):
        return log("no knob recompute_granularity: the model sets up its kind of recompute at launch")
    if getattr(config, "cpu_offloading", False):
        return log("no knob recompute_granularity: CPU offloading does not work with recompute")

    def set_granularity(value: str) -> None:
        for one in configs:
            if value == FULL and one.recompute_method is None:
                one.recompute_method, one.recompute_num_layers = "uniform", 1
            one.recompute_granularity = None if value == NONE else value

    return loop.knob(
        "recompute_granularity",
        str,
        [NONE, FULL],
        value=config.recompute_granularity or NONE,
        apply=set_granularity,
        loss_neutral=True,
        about="full: each layer's activations are computed again in the backward",
    )


def _set(configs: list[Any], name: str, value: float) -> None:
    for config in configs:
        setattr(config, name, value)


def _configs(model: Sequence[Any], config: Any) -> Iterator[Any]:
    """Yields the model's configuration object and those of the modules that have their own configuration object."""
    found = {id(config): config}
    for chunk in model:
        for module in chunk.modules():
            own = getattr(module, "config", None)
            if hasattr(own, "recompute_granularity"):
                found[id(own)] = own
    yield from found.values()
