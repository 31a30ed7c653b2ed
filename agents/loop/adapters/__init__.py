"""Adapters connect the training loops of other libraries to a hub with at most two lines (docs/join/adapters.md).

Each library has its own file. Only this folder of `agents` may import torch or another library's training loop, and
only inside functions, so that importing an adapter imports neither.
"""
