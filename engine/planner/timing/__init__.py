"""Predicts the time of a training step and of its parts: kernels, collectives, stages and the pipeline."""
