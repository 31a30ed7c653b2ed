"""Runs a layout in fp64 with the launcher and prints the run's events: ``relaid.py RUN_DIR [--resume] section.key=value
...``"""

import sys
from pathlib import Path

import torch

from engine.config.toml import load
from engine.launch.output import Output
from engine.launch.run import run_layout

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # the forked ranks inherit it
    resumes = "--resume" in sys.argv
    layout = load("layouts/demo.toml", [word for word in sys.argv[2:] if word != "--resume"])
    output = Output(layout, as_json=True)
    status = run_layout(
        layout,
        resume=resumes,
        run_dir=Path(sys.argv[1]),
        on_folder=output.begin,
        on_start=output.start,
        on_summary=output.step,
        on_restart=output.restart,
        on_restarted=output.restarted,
        on_end=output.end,
    )
    raise SystemExit(status)
