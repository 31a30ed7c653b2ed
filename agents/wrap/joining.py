"""Makes a wrapped process a rank of a run: a thread finds or starts the hub while training continues."""

import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.protocol.base import clean
from agents.wrap.exchange import ClosedError, StoreRanks

if TYPE_CHECKING:
    from agents.loop.adapters.knobs.learning_rate import LearningRateScale
    from agents.transport.reach import Reach
    from agents.wrap.hooks import Hooks
    from agents.wrap.loop import WrappedLoop
    from agents.wrap.sensors.phases import Phases

JOIN_S = 5.0  # how long the end of a program waits for the thread


class Joining:
    """The thread that joins a run. `done`: whether it has ended, successfully or not. `failure`: why this process could
    not join."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.closing = threading.Event()
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._ranks = StoreRanks(self.closing) if together else None
        self._stack = ExitStack()
        self._reached: Reach | None = None
        self._facts: dict[str, Any] = {}
        self.failure = ""
        self.done = False
        self._thread = threading.Thread(target=self._work, name="cockpit-join", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            import agents.wrap.loop  # noqa: F401 - here, because its imports take time
            from agents.loop.start_hub import endpoint_for
            from agents.rank.provenance import provenance

            rank, world = (self._ranks.rank, self._ranks.world) if self._ranks else (0, 1)
            number = iter(range(9))
            self._facts = provenance(command=sys.argv) if rank == 0 else {}

            def agree(own: bytes) -> list[bytes]:
                assert self._ranks
                return self._ranks.gather(f"join/{next(number)}", own)

            hub = os.environ.get("COCKPIT_WRAP_HUB") or "auto"
            gather = agree if self._ranks else None
            self._reached = endpoint_for(self._stack, hub, run_name(), None, rank, world, gather)
        except ClosedError:
            self.failure = "the program ended"
        except Exception as error:  # noqa: BLE001 - a full disk, for example, must not end the program
            self.failure = f"no hub: {error}"
        self.done = True

    def loop(self, rates: "LearningRateScale", phases: "Phases", hooks: "Hooks") -> "WrappedLoop | None":
        """Connect to the run; must be called in the training thread. Returns None if the program joins a run itself."""
        import agents.loop.join as joins
        from agents.loop.start_hub import is_first_on_machine
        from agents.protocol import VERSION, Hello
        from agents.rank.sensors.vitals import Sensors
        from agents.rundir.local_machine import process_start, this_host, this_machine
        from agents.wrap.loop import WrappedLoop

        def theirs(original: Any, *args: Any, **kwargs: Any) -> Any:
            hooks.end(OWN)
            return original(*args, **kwargs)

        if joins_itself():
            hooks.end(OWN)
            self.close()
            return None
        hooks.wrap(joins, "join", theirs)
        rank, world = (self._ranks.rank, self._ranks.world) if self._ranks else (0, 1)
        device = current_device()
        hello = Hello(
            version=VERSION,
            run=run_name(),
            rank=rank,
            world=world,
            coords=coordinates_in_mesh(rank, world),
            host=this_host(),
            pid=os.getpid(),
            device="" if device is None else str(device),
            layout="-",
            revision=0,
            step=0,
            leader=rank == 0,
            facts=self._facts,
            began_s=time.time(),
            first_step=1,
            machine=this_machine(),
            process_start=process_start(os.getpid()),
        )
        sensors = Sensors(device, host=is_first_on_machine())
        return WrappedLoop(
            hello, self._reached, self._ranks, sensors, self._stack, rates, phases, self.closing
        )

    def close(self) -> None:
        """End the thread, and the hub if the thread has started one."""
        self.closing.set()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._stack.close()


OWN = "the program joins a run itself"


def joins_itself() -> bool:
    """Whether the program joins a run itself: through `agents.join`, an adapter, or the engine."""
    import gc

    agent = getattr(sys.modules.get("agents.rank.agent"), "Agent", None)
    if agent is None:
        return False
    return any(type(one) is agent and one.open for one in gc.get_objects())


MODEL_AXES = ("tp", "pp", "cp", "tensor_parallel", "pipeline_parallel", "context_parallel")
"""Names of mesh dimensions whose ranks load the same batch."""


def coordinates_in_mesh(rank: int, world: int) -> dict[str, int]:
    """This rank's coordinates on the axes with more than one rank, in a `DeviceMesh` of all ranks in which ranks share
    their batches; without such a mesh, the rank on the axis `dp`."""
    import gc

    kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    meshes = [one for one in gc.get_objects() if type(one) is kind] if kind and world > 1 else []
    found: dict[str, int] = {"dp": rank} if world > 1 else {}
    for mesh in meshes:
        names, at = mesh.mesh_dim_names, mesh.get_coordinate()
        if not names or at is None or mesh.size() != world:
            continue
        own = {name: int(at[place]) for place, name in enumerate(names) if mesh.size(place) > 1}
        if any(name in MODEL_AXES for name in own) and len(own) >= len(found):
            found = own
    return found


def run_name() -> str:
    """The name of the run: the name given to `cockpit wrap`, else the name of the script."""
    script = Path(sys.argv[0] if sys.argv else "")
    named = script.parent.name if script.stem == "__main__" else script.stem
    return clean(os.environ.get("COCKPIT_WRAP_RUN") or named or "program")[:64]


def current_device() -> int | None:
    """The index of the GPU that this process uses; None if it uses no GPU."""
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
