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
    from agents.transport.reach import Reach
    from agents.wrap.hooks import Hooks
    from agents.wrap.loop import WrappedLoop
    from agents.wrap.optimizers import LearningRateScale
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
            from agents.rundir.runs import remove_unrecorded

            rank, world = (self._ranks.rank, self._ranks.world) if self._ranks else (0, 1)
            number = iter(range(9))
            self._facts = provenance(command=sys.argv) if rank == 0 else {}

            def agree(own: bytes) -> list[bytes]:
                assert self._ranks
                return self._ranks.gather(f"join/{next(number)}", own)

            hub = os.environ.get("COCKPIT_WRAP_HUB") or "auto"
            gather = agree if self._ranks else None
            folder = None
            if hub == "auto" and rank == 0:
                folder = own_folder(run_name())
                self._stack.callback(remove_unrecorded, folder)
            self._reached = endpoint_for(self._stack, hub, run_name(), folder, rank, world, gather)
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
        from agents.rundir.local_machine import this_host
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
            coords={"dp": rank} if world > 1 else {},
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


def run_name() -> str:
    """The name of the run: the name given to `cockpit wrap`, else the name of the script."""
    script = Path(sys.argv[0] if sys.argv else "")
    named = script.parent.name if script.stem == "__main__" else script.stem
    return clean(os.environ.get("COCKPIT_WRAP_RUN") or named or "program")[:64]


def own_folder(run: str) -> Path:
    """Create a run folder. The folder name is unique even if several processes, such as those of a sweep, start in the
    same second.
    """
    from agents.rundir.runs import folder_name

    named = f"{folder_name(run)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(os.environ.get("COCKPIT_RUNS") or "runs") / named
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        folder = folder.with_name(f"{folder.name}-{os.getpid()}")
    return folder


def current_device() -> int | None:
    """The index of the GPU that this process uses; None if it uses no GPU."""
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
