"""Panels about the pipeline and the steps of a run."""
