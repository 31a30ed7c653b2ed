"""Connects a training loop that is not the engine's to a hub.

The package is named `loop`, not `join`, because `agents.join` is the public function.
"""
