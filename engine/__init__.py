"""Trains Mixture-of-Experts transformers over a grid of ranks.

`engine.layout`, `.grid` and `.planner` need no torch.
"""
