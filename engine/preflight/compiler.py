"""Checks that this machine has the compiler and headers that `train.compile` needs. Does not import torch, because it
runs before any rank is started."""

import os
import shutil
import sysconfig
from pathlib import Path


def compiler_refusal() -> str | None:
    """An error message if the C++ compiler or Python's headers are missing, else None. torch.compile needs them on the
    CPU."""
    compiler = os.environ.get("CXX", "g++")  # torch has the same default
    if shutil.which(compiler) is None:
        return (
            f"train.compile = true needs a C++ compiler, but {compiler} is not found; "
            f"legal: CXX set to an installed compiler, or train.compile = false"
        )
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        return (
            f"train.compile = true needs Python's headers, but {headers} has no Python.h; "
            f"legal: install the headers, or train.compile = false"
        )
    return None
