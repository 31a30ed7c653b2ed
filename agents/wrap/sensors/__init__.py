"""Measurements of a step: the loss, the times of phases and of forward passes, and the traffic."""
