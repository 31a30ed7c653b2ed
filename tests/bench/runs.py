"""Runs the demo and reads its NDJSON."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def demo(*arguments: str) -> tuple[float, list[dict[str, Any]]]:
    """Run the demo. Returns the start time in seconds since the epoch, and the step events."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "engine", "run", "layouts/demo.toml", "--json"]
        began = time.time()
        done = subprocess.run(
            [*command, "--run-dir", f"{folder}/run", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return began, [event for event in events if event["event"] == "step"]
