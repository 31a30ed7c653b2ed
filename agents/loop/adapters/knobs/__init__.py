"""Knobs that several adapters share."""
