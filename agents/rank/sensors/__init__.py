"""Reads the state of the device and the host during training: memory, power, temperature, throttling."""
