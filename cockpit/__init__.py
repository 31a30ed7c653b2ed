"""The cockpit: see a training run and steer it, from a terminal or from a script."""
