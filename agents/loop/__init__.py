"""Joins any training loop, not only the engine's, to a hub.

The design calls this room `join`; it is named `loop` because `agents.join` is the public function.
"""
