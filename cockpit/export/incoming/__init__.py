"""Receives the measurements that a training program exports with OpenTelemetry, and shows the program as a run."""
