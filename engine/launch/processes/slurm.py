"""Reads Slurm's environment variables: whether this process is one rank of several, the number of tasks on this node,
and the rendezvous address for the ranks of a job step."""

import re
from collections.abc import Mapping

from agents.rundir.node_relay import tasks_per_node

# Below Linux's ephemeral ports, which begin at 32768.
FIRST_PORT, PORTS = 15_000, 16_000


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks.

    SLURM_PROCID alone does not show this, because Slurm also sets it in a batch script (outside any job step) and in an
    interactive shell (a job step with one task).
    """
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ:
        return False
    return "SLURM_PROCID" in environ and environ.get("SLURM_NTASKS", "1") != "1"


def tasks_on_this_node(environ: Mapping[str, str], world: int) -> int:
    """The number of tasks on this node, from Slurm's list of tasks per node, such as ``4(x2),3``. If Slurm gives no
    such list, all `world` tasks are on this node. Raises ValueError if this node is not in the list."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    counts = tasks_per_node(listed)
    node = int(environ.get("SLURM_NODEID", "0"))
    if node >= len(counts):
        raise ValueError(
            f"started by Slurm, but SLURM_NODEID = {node} is not in its list of tasks per node, {listed!r}"
        )
    return counts[node]


def meeting(environ: Mapping[str, str]) -> dict[str, str]:
    """The rendezvous address: MASTER_ADDR is the first node of the Slurm job step, which has rank 0, and MASTER_PORT
    depends on the job and the job step. A variable that the environment already sets is left out. Empty outside a job
    step, or if Slurm's variables are missing."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not in_step(environ) or not nodes or not job.isdecimal() or not step.isdecimal():
        return {}
    port = FIRST_PORT + (int(job) * 16 + int(step)) % PORTS
    found = {"MASTER_ADDR": first_node(nodes), "MASTER_PORT": str(port)}
    return {name: value for name, value in found.items() if not environ.get(name)}


def first_node(nodes: str) -> str:
    """The first host of Slurm's list of nodes, such as ``n[03-05,9],login`` or ``rack[1-2]n[0-7]``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0] if first else "")
