"""Adapters connect the training loops of other libraries to a hub with at most two lines (docs/join/adapters.md).

Each library has its own file or folder. Of `agents`, only this folder and `agents.wrap` import torch, and only inside
functions. Adapters get the objects of a library's training loop from the program, so importing an adapter imports
neither torch nor the library.
"""
