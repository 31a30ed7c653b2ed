"""The knob `lr_scale`: a factor on the learning rates of torch optimizers, applied only during `optimizer.step`.

Before the step, the learning rate of each parameter group is multiplied by the factor; after the step, the program's
own value is restored. So programs and schedulers that set learning rates read and write only their own values, whatever
the scheduler, and checkpoints contain no factor.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.loop.loop import Loop

LR_SCALE = (1e-3, 10.0)
"""Legal factors."""

PARTS = ("optimizers", "chained_optimizers", "sub_optimizers")  # optimizers inside a container of a library
INNER = "optimizer"  # the optimizer inside a wrapper of a library


class LearningRateScale:
    """The factor `scale`, and the rates that it replaces during a step."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._own: list[tuple[Any, Any, Any]] = []  # group, the program's rate, the rate in force

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply the optimizer's learning rates by `scale`: a hook before the optimizer's step. If the step gets a
        closure, which may contain the program's training step, the closure sees the program's own rates."""
        self.apply(optimizer)
        if self.scale == 1.0:
            return None
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": self._with_own_rates(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._with_own_rates(optimizer, args[1]), *args[2:]), kwargs
        return None

    def _with_own_rates(self, optimizer: Any, closure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(closure)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.restore()
            try:
                return closure(*args, **kwargs)
            finally:
                self.apply(optimizer)

        return wrapped

    def apply(self, optimizer: Any) -> None:
        """Multiply the optimizer's learning rates by `scale`."""
        self.restore()  # if the last step raised an exception
        if self.scale == 1.0:
            return
        for group in optimizer.param_groups:
            own = group.get("lr")
            if own is not None:
                group["lr"] = own * self.scale
                self._own.append((group, own, group["lr"]))

    def restore(self) -> None:
        """Restore the program's own learning rates, except those that the program has changed since `apply`."""
        for group, own, scaled in self._own:
            if group.get("lr") is scaled:
                group["lr"] = own
        self._own.clear()

    def close(self) -> None:
        """Restore the program's own learning rates for good."""
        self.scale = 1.0
        self.restore()

    def rate(self, optimizer: Any) -> float | None:
        """The scaled learning rate of the first parameter group, outside a step; None if it is a tensor on a device,
        because reading it would wait for the device, or if there is no group.
        """
        own = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if own is None or getattr(getattr(own, "device", None), "type", "cpu") != "cpu":
            return None
        return float(own) * self.scale


class LearningRate:
    """The knob `lr_scale` of a loop that steps `optimizers`: torch optimizers, or a library's wrappers and containers
    of such. `refusal`: why there is no knob; "" if there is one."""

    def __init__(self, *optimizers: Any) -> None:
        self._scale = LearningRateScale()
        found = (one for optimizer in optimizers for one in torch_optimizers(optimizer))
        self._optimizers = list({id(one): one for one in found}.values())
        self._hooks: list[Any] = []
        foreign = next((one for one in self._optimizers if not hasattr(one, "register_step_pre_hook")), None)
        self.refusal = "" if foreign is None else f"{type(foreign).__name__} is not an optimizer of torch"

    def declare(self, loop: "Loop") -> None:
        """Declare the knob, or log why it is not available."""
        if self.refusal:
            return loop.event(f"no knob lr_scale: {self.refusal}")
        loop.knob(
            "lr_scale",
            float,
            LR_SCALE,
            value=1.0,
            apply=functools.partial(setattr, self._scale, "scale"),
            loss_neutral=False,
            about="factor on the learning rates that the program sets",
        )
        for one in self._optimizers:
            self._hooks += [
                one.register_step_pre_hook(self._scale.before_step),
                one.register_step_post_hook(lambda *_: self._scale.restore()),
                # If a step has raised an exception, the program may save a checkpoint.
                one.register_state_dict_pre_hook(lambda *_: self._scale.restore()),
            ]
        return None

    @property
    def scale(self) -> float:
        """The factor in force."""
        return self._scale.scale

    def current(self) -> float | None:
        """The learning rate of the first parameter group, including the factor; None if it is unknown."""
        return self._scale.rate(self._optimizers[0]) if self._optimizers else None

    def remove(self) -> None:
        """Remove the hooks; the program's own learning rates apply again."""
        self._scale.close()
        while self._hooks:
            self._hooks.pop().remove()


def torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """The innermost optimizers, whose steps update the weights: those inside the wrappers of Accelerate, DeepSpeed and
    Megatron, and inside the containers of torchtitan and Megatron."""
    parts = next((found for name in PARTS if (found := getattr(optimizer, name, None))), None)
    if parts is None:
        inner = getattr(optimizer, INNER, optimizer)
        if inner is optimizer:
            yield optimizer
            return
        parts = [] if inner is None else [inner]
    for part in parts:
        yield from torch_optimizers(part)
