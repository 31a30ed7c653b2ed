"""Times the forward passes of the outermost modules: those that have parameters and are not part of another module.

torch's global module hooks would cost time in each submodule, and hooks on a single module would be saved and copied
with the module. Instead, the `__call__` method of each outermost module's class is wrapped. The outermost modules are
found by searching all objects that Python's garbage collector tracks.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

from agents.wrap.hooks import Hooks
from agents.wrap.sensors.phases import Phases
from agents.wrap.sensors.traffic import Replicas, StepTraffic


class Forwards:
    """Times the forward passes of the outermost modules."""

    def __init__(self, hooks: Hooks, phases: Phases, replicas: Replicas, traffic: StepTraffic) -> None:
        self.phases = phases
        self._hooks, self._replicas, self._traffic = hooks, replicas, traffic
        # The outermost modules, and the DistributedDataParallel in each.
        self._outermost: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
        self._inside = False
        self._wrapped: set[type] = set()

    def follow(self) -> None:
        """Find the outermost modules of the program and wrap the `__call__` methods of their classes."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
        inner = {id(child) for one in modules for child in getattr(one, "_modules", {}).values()}
        for module in modules:
            if id(module) in inner or isinstance(module, torch.jit.ScriptModule):
                continue
            if next(module.parameters(), None) is None:
                continue
            replicated = next((one for one in module.modules() if type(one) is DistributedDataParallel), None)
            self._outermost[module] = weakref.ref(replicated) if replicated is not None else _none
            if type(module) not in self._wrapped:
                self._wrapped.add(type(module))
                self._hooks.wrap(type(module), "__call__", self._call)

    def _call(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not self.phases.ours or module not in self._outermost:
            return original(module, *args, **kwargs)
        import torch

        name = "forward" if torch.is_grad_enabled() else "evaluation"
        replicated = self._outermost[module]()
        if replicated is not None and name == "forward":
            self._hooks.guarded(self._replicas.forward, replicated, self._traffic)
        self._inside = True
        self.phases.enter(name)
        try:
            return original(module, *args, **kwargs)
        finally:
            self._inside = False
            self.phases.leave(name)


def _none() -> None:
    return None
