"""Tests of the manifest docs/clusters/kubernetes.yaml: it is valid under Kubernetes' own schemas, and torchrun and the
engine accept their arguments in its container command."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from agents.transport.addresses import listen_address
from agents.transport.curve_keys import KeyStore
from agents.transport.roles import Role
from engine.cli.main import parser
from engine.config.toml import load
from tests.ranks.launch.test_join import free_port
from tests.ranks.program import ROOT, Program

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which kubernetes-validate brings")
MANIFEST = ROOT / "docs/clusters/kubernetes.yaml"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))
BY_KIND = {document["kind"]: document for document in DOCUMENTS}
# The oldest release with all fields that the manifest uses, and a newer one.
VERSIONS = ("1.29", "1.34")


def pod() -> dict[str, Any]:
    return BY_KIND["Job"]["spec"]["template"]["spec"]


def command_in_pod(index: int, **replaced: str) -> list[str]:
    """The container command of the pod with this index, with each $(NAME) replaced as Kubernetes does."""
    environ = {"JOB_COMPLETION_INDEX": str(index), "POD_IP": "10.0.0.7"} | replaced
    words = pod()["containers"][0]["command"]
    return [re.sub(r"\$\((\w+)\)", lambda name: environ[name[1]], word) for word in words]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_each_document_is_valid(document: dict[str, Any], version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    validator.validate(document, version, strict=True)


def test_a_misspelt_field_is_invalid() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    document = json.loads(json.dumps(BY_KIND["Job"]))
    document["spec"]["completionmode"] = document["spec"].pop("completionMode")
    with pytest.raises(validator.ValidationError):
        validator.validate(document, VERSIONS[0], strict=True)


def test_the_names_lead_to_the_pods() -> None:
    job, service = BY_KIND["Job"], BY_KIND["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod()["subdomain"] == service["metadata"]["name"]
    master = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"--master-addr={master}" in pod()["containers"][0]["command"]
    attach = f"cockpit attach tcp://{master}:29600"
    assert attach in MANIFEST.read_text() and attach in (MANIFEST.parent / "kubernetes.md").read_text()
    assert {port["port"] for port in service["spec"]["ports"]} == {29500, 29600}
    mounted = {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in pod()["volumes"]}


@pytest.mark.parametrize("index", [0, 1])
def test_the_command_is_understood(index: int) -> None:
    torchrun, *words = command_in_pod(index)
    assert torchrun == "torchrun"
    from torch.distributed.run import get_args_parser

    launched = get_args_parser().parse_args(words)
    assert (launched.node_rank, launched.nnodes, launched.master_port) == (index, "2", 29500)
    assert (launched.module, launched.training_script) == (True, "engine")
    assert launched.nnodes == str(BY_KIND["Job"]["spec"]["completions"])
    options, rest = parser().parse_known_args(launched.training_script_args)
    layout = load(options.layout, options.overrides + rest)
    assert layout.ranks.world == int(launched.nnodes) * int(launched.nproc_per_node)
    assert layout.checkpoint.every
    assert options.resume == "auto"
    assert options.run_dir.is_relative_to("/runs")
    assert listen_address(options.listen) == ("10.0.0.7", 29600)


@pytest.mark.exhaustive
def test_the_command_trains_and_continues(tmp_path: Path) -> None:
    """Starts two pods on this machine, and starts them again as after a failure: the second start resumes the run."""
    KeyStore(tmp_path / "keys").make("cluster", Role.RANK)
    for steps, first in (("3", 0), ("5", 3)):
        port, hub_port = free_port(), free_port()
        pods = []
        for index in range(2):
            _, *words = command_in_pod(index, POD_IP="127.0.0.1")
            words = [word.replace("demo-0.demo", "127.0.0.1").replace("29500", port) for word in words]
            words = [word.replace("29600", hub_port).replace("/runs/", f"{tmp_path}/") for word in words]
            words += ["--json", "--device", "cpu", f"train.steps={steps}", "train.global_batch=8"]
            environ = os.environ | {"COCKPIT_KEYS": str(tmp_path / "keys"), "OMP_NUM_THREADS": "1"}
            pods.append(
                Program(
                    "-m",
                    "torch.distributed.run",
                    *words,
                    environ=environ,
                    errors=tmp_path / f"errors-{index}",
                )
            )
        lines, _ = pods[0].communicate(200)
        pods[1].communicate(60)
        assert [pod.wait(60) for pod in pods] == [0, 0], (tmp_path / "errors-0").read_text()
        events = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
        done = [event["step"] for event in events if event["event"] == "step"]
        assert done == list(range(first, int(steps)))
