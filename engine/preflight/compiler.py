"""Whether this machine can compile what `train.compile` asks for. Torch-free: asked before anything is started."""

import os
import shutil
import sysconfig
from pathlib import Path


def compiler_refusal() -> str | None:
    """What torch.compile lacks for the CPU, in one sentence, or None: a C++ compiler, and Python's headers."""
    compiler = os.environ.get("CXX", "g++")  # as torch looks for it
    if shutil.which(compiler) is None:
        return (
            f"train.compile = true needs a C++ compiler, and there is no {compiler}; "
            f"legal: CXX set to one that is there, or train.compile = false"
        )
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        return (
            f"train.compile = true needs Python's headers, and there is no Python.h in {headers}; "
            f"legal: with them installed, or train.compile = false"
        )
    return None
