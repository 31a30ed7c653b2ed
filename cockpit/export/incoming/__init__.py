"""Receives measurements that a training program exports by itself, and shows them as a run."""
