"""Joins a training loop that is not ours to a hub.

The design calls this room `join`; it is named `loop` because `agents.join` is the public function.
"""
