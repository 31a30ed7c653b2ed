"""Predicted time of a training step: of kernels, collectives, stages and the pipeline."""
