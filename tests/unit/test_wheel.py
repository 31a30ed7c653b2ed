"""The wheel contains every file of the packages. The layouts in it are found by name from any working directory."""

import subprocess
from pathlib import Path

import pytest

from engine import layouts
from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.simulate.scenario import load_scenario

ROOT = Path(__file__).parents[2]


def test_the_wheel_contains_every_file() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {path for path in listed.stdout.split("\0") if (ROOT / path).is_file()}
    included = {file.distribution_path for file in wheel.recurse_included_files()}
    packaged = {path for path in tracked if path.startswith(("agents/", "cockpit/", "engine/"))}
    assert packaged <= included
    forced = {file.distribution_path for file in wheel.recurse_forced_files(wheel.config.get_force_include())}
    assert {f"engine/{path}" for path in tracked if path.startswith("layouts/")} <= forced


def test_shipped_layouts_are_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = {path.stem for path in (ROOT / "layouts").rglob("*.toml")}
    assert {*layouts.names(), *layouts.names(layouts.SCENARIOS)} == shipped
    monkeypatch.chdir(tmp_path)
    demo = load("demo")
    assert demo == load("layouts/demo.toml") == load(ROOT / "layouts" / "demo.toml")
    assert load("deepseek-v3", ["train.steps=7"]).train.steps == 7
    assert load_scenario("straggler") == load_scenario("layouts/scenarios/straggler.toml")
    (tmp_path / "demo").write_text((ROOT / "layouts" / "moe-1b.toml").read_text())
    assert load("demo") != demo  # a file of the user comes first
    with pytest.raises(
        LayoutError, match=r"^there is no layout 'dema'; legal: a TOML file, or deepseek-mini, "
    ):
        load("dema")
    (tmp_path / "demo").unlink()
    with pytest.raises(LayoutError, match=r"^there is no scenario 'demo'; legal: a TOML file, or hang, "):
        load_scenario("demo")
