"""Relay: one connection to the hub for all ranks of a node."""
