"""Readings of the device and the host beside training: memory, power, temperature, throttling."""
