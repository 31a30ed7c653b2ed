"""`cockpit mcp`, driven by the SDK's client over stdio on a live simulated run: viewers, operators, bad input."""

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cockpit.cli.main import run as cockpit
from cockpit.cli.mcp.bounds import MOST_BYTES, bounded
from tests.unit.agents.fleet import environment
from tests.unit.cockpit.simulated_run import NAME, simulated_run

mcp = pytest.importorskip("mcp", reason="needs the MCP SDK: pip install 'train-cockpit[mcp]'")
REFUSED = "this connection only watches; changes require the role operator"
CHANGING = {"propose", "action", "undo", "try_change", "end_trial"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    with simulated_run(folder):
        yield folder


@asynccontextmanager
async def server(runs: Path, *options: str) -> AsyncIterator[Any]:
    """Start `cockpit mcp small OPTIONS`, and yield a client connected to it."""
    command = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "cockpit", "mcp", NAME, *options],
        env=environment() | {"COCKPIT_RUNS": str(runs)},
    )
    async with mcp.Client(command) as client:
        yield client


async def answer(client: Any, tool: str, **arguments: object) -> dict[str, Any]:
    """The result of a tool call that succeeds."""
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found.content
    record: dict[str, Any] = found.structured_content
    assert json.loads(found.content[0].text) == record
    return record


async def error(client: Any, tool: str, **arguments: object) -> str:
    """The error message of a tool call that fails."""
    found = await client.call_tool(tool, arguments)
    assert found.is_error, found.structured_content
    text: str = found.content[0].text
    return text


def logged(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands and trials in the run's log, as `cockpit log` prints them."""
    monkeypatch.setenv("COCKPIT_RUNS", str(runs))
    assert cockpit(["log", NAME, "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [
        entry.get("command") or entry.get("trial") for entry in entries if {*entry} & {"command", "trial"}
    ]


async def test_a_viewer_reads_everything_and_changes_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logged(runs, capsys, monkeypatch)
    async with server(runs) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert not CHANGING & {*tools} and all(tool.annotations.read_only_hint for tool in tools.values())
        status = await answer(client, "status")
        assert (status["run"], status["simulated"], status["link"]) == ("small", True, "live")
        assert status["coverage"] == {"reporting": 32, "world": 32} and status["age_s"] < 30
        watched = await answer(client, "watch", seconds=2.0)
        assert watched["step"] >= status["step"] and watched["steps_ended"] >= len(watched["steps"])
        found = await answer(client, "metric", metric="loss", first_step=2, last_step=6)
        assert [step for step, _ in found["points"]] == [2, 3, 4, 5, 6] and found["width"] == 1
        thin = await answer(client, "metric", metric="step_ms", most_points=8)
        assert len(thin["points"]) <= 8 and thin["width"] > 1 and thin["unit"] == "ms"
        past = await answer(client, "at_step", step=3)
        assert past["summary"]["step"] == 3 and any(line.startswith("ranks: ") for line in past["cut"])
        ranks = await answer(client, "ranks", filter="pp=1 & tp=0", limit=2)
        assert (ranks["matching"], ranks["shown"]) == (4, 2) and ranks["ranks"][0]["coords"]["pp"] == 1
        assert (await answer(client, "diagnosis"))["diagnosis"]["text"]
        assert {one["name"] for one in (await answer(client, "settings"))["knobs"]} >= {
            "micro_batches",
            "pause",
        }
        assert (await answer(client, "list_runs"))["runs"][0]["state"] == "live"
        preview = await answer(client, "preview", changes={"micro_batches": 16})
        step_time = next(one for one in preview["estimates"] if one["quantity"] == "step_ms")
        assert step_time["low"] < step_time["high"] and step_time["source"]
        assert REFUSED in await error(client, "propose", changes={"micro_batches": 16})
        assert REFUSED in await error(client, "try_change", knob="micro_batches", value=16)
        assert REFUSED in await error(client, "undo")
        assert REFUSED in await error(client, "action", action="stop")
    assert logged(runs, capsys, monkeypatch) == before


async def test_changes_of_an_operator_are_in_the_log_under_its_name(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(runs, "--operator", "--name", "sweep of ada") as client:
        assert {tool.name for tool in (await client.list_tools()).tools} >= CHANGING
        applied = await answer(client, "propose", changes={"micro_batches": 16}, reason="fewer bubbles")
        assert (applied["state"], applied["acks"], applied["who"].split(" (")[0]) == (
            "applied",
            32,
            "sweep of ada",
        )
        undone = await answer(client, "undo", reason="back")
        assert undone["changes"] == {"micro_batches": 8}
        trial = await answer(client, "try_change", knob="micro_batches", value=4, steps=4, reason="a hunch")
        assert trial["state"] in ("kept", "reverted") and trial["low"] <= trial["ratio"] <= trial["high"]
        assert (await answer(client, "trial"))["id"] == trial["id"]
        assert (await answer(client, "action", action="pause"))["state"] == "applied"
        assert (await answer(client, "action", action="resume"))["state"] == "applied"
        refused = await answer(client, "propose", changes={"micro_batches": 3})
        assert refused["state"] == "rejected" and "micro_batches = 3 is not legal" in refused["why"]
        log = await answer(client, "log", limit=5)
        assert any(
            "sweep of ada" in line["source"] or "sweep of ada" in line["text"] for line in log["lines"]
        )
    changes = logged(runs, capsys, monkeypatch)
    mine = [one for one in changes if one["who"].startswith("sweep of ada (mcp, ")]
    assert {one["reason"] for one in mine} >= {"fewer bubbles", "back", "a hunch"}


async def test_bad_input_is_refused_before_it_reaches_the_hub(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cockpit.cli.mcp.server import CockpitServer
    from cockpit.cli.mcp.session import Session

    monkeypatch.setenv("COCKPIT_RUNS", str(runs))
    before = logged(runs, capsys, monkeypatch)
    session = Session(NAME, True, "mcp")
    async with mcp.Client(CockpitServer(session)) as client:
        for changes in (
            {},
            {"a=b": 1},
            {"micro_batches": "\x1b[2J"},
            {"micro_batches": "8" * 201},
            {"micro_batches": [8]},
            {"x" * 70: 1},
        ):
            assert "validation error" in await error(client, "propose", changes=changes)
        unknown = {"undo": {"run": "other"}, "propose": {"changes": {"micro_batches": 4}, "dry_run": True}}
        for tool, arguments in unknown.items():
            assert "Extra inputs are not permitted" in await error(client, tool, **arguments)
        listed = (await client.list_tools()).tools
        assert len(listed) == 17 and all(not one.input_schema["additionalProperties"] for one in listed)
        assert "validation error" in await error(client, "metric", metric="nonsense")
        assert "validation error" in await error(client, "watch", seconds=3600)
        assert "validation error" in await error(client, "at_step", step=-1)
        assert "holds the steps" in await error(client, "at_step", step=10**9)
        assert "last_step 1 is before first_step 5" in await error(
            client, "metric", metric="loss", first_step=5, last_step=1
        )
        assert "nonsense" in await error(client, "ranks", filter="nonsense > 1")
    session.close()
    assert logged(runs, capsys, monkeypatch) == before


def test_answers_are_bounded_and_without_control_characters() -> None:
    record = {
        "text": "[red]\x1b[2J\x9b\u202e" + "x" * 9000,
        "ranks": [{"host": "h" * 90, "n": n} for n in range(9000)],
    }
    found = bounded(record)
    assert len(msgspec.json.encode(found)) <= MOST_BYTES
    assert (
        found["text"].startswith("[red] [2J") and found["text"].isprintable() and found["text"].endswith("…")
    )
    assert found["cut"] == [f"ranks: the first {len(found['ranks'])} of 9000 entries"]
    assert [one["n"] for one in found["ranks"]] == list(range(len(found["ranks"])))
    assert bounded({"a": float("nan"), "b": [1]}) == {"a": None, "b": [1]}


def test_a_value_with_many_texts_is_removed_after_its_lists_were_truncated() -> None:
    texts = {str(n): "x" * 1000 for n in range(40)}
    found = bounded({"rank": 3, "console": {"lines": [*range(100)], "files": texts}})
    assert found == {"rank": 3, "console": None, "cut": ["console: too large"]}
    lists = {str(n): list(range(500)) for n in range(400)}
    assert len(msgspec.json.encode(bounded(lists))) <= MOST_BYTES, "the field `cut` counts too"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mcp", "not-there", "--name", "a\x1bb"], "is not a name"),
        (["mcp", "not-there", "--name", "n" * 65], "is not a name"),
        (["mcp", "not-there"], "there is no run not-there"),
    ],
)
def test_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert cockpit(words) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_without_the_sdk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSdk:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "mcp":
                raise ModuleNotFoundError("no SDK here", name="mcp")

    for name in [
        name for name in sys.modules if name == "mcp" or name.startswith(("mcp.", "cockpit.cli.mcp."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoSdk(), *sys.meta_path])
    assert cockpit(["mcp"]) == 2
    assert capsys.readouterr().err == "this needs mcp: pip install 'train-cockpit[mcp]'\n"
