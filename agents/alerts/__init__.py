"""Alert detectors. Each detector reads the run's state and returns findings; no detector uses a socket."""
