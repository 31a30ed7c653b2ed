"""What the watch measures in a step: loss, times of phases and of forward passes, traffic."""
