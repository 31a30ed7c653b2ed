"""Tests the rendezvous of the ranks of a Slurm job step, and the check whether Slurm has restarted a job."""

import pytest

from engine.checkpoint.resume_point import is_restart
from engine.launch.processes.slurm import FIRST_PORT, PORTS, first_node, meeting

STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "n[03-04]",
    "SLURM_JOB_NODELIST": "n[01-04]",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[03-05,9],login", "n03"),
        ("gpu-[7,9-12].cluster", "gpu-7.cluster"),
        ("rack[1-2]n[0-7]", "rack1n0"),
        ("login,n[1-2]", "login"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_the_ranks_of_a_step_meet_on_its_first_node() -> None:
    found = meeting(STEP)
    assert found["MASTER_ADDR"] == "n03"
    assert FIRST_PORT <= int(found["MASTER_PORT"]) < FIRST_PORT + PORTS <= 32768
    assert meeting(STEP | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != found["MASTER_PORT"]
    assert meeting(STEP | {"SLURM_JOB_ID": "72"})["MASTER_PORT"] != found["MASTER_PORT"]


def test_what_the_environment_sets_stays() -> None:
    assert meeting(STEP | {"MASTER_ADDR": "other"}).keys() == {"MASTER_PORT"}
    assert meeting(STEP | {"MASTER_ADDR": "other", "MASTER_PORT": "1"}) == {}


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_JOB_ID"])
def test_outside_a_step_there_is_no_meeting(missing: str) -> None:
    assert meeting({name: value for name, value in STEP.items() if name != missing}) == {}


def test_a_requeued_job_is_a_restart() -> None:
    assert not is_restart({"SLURM_RESTART_COUNT": "0"})
    assert is_restart({"SLURM_RESTART_COUNT": "1"})
    assert is_restart({"TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": ""})
