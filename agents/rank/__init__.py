"""The agent in each rank's process: sends telemetry and receives commands without blocking training."""
