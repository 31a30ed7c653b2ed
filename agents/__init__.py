"""Carries telemetry out of a training run and commands in. Imports neither torch nor a screen."""
