"""Live mirrors: the curves of a run, step by step, in other programs."""
