"""Imports the modules that most of the programs started by tests need. A process imports this module once, and
`tests/ranks/program.py` forks the programs from this process."""

import os

# torch reads these once, when it is imported; `engine.launch` sets them for the ranks that it forks.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch.distributed.pipelining  # noqa: F401
import zmq  # noqa: F401

import engine.launch.rank_main
import engine.sampling.decoder  # noqa: F401
