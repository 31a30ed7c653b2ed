"""Live mirrors, which copy the curves of a run to other programs, step by step."""
