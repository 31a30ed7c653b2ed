"""Connects a training loop other than the engine's to a hub.

The package is named `loop`, not `join`, because `agents.join` is the public function.
"""
