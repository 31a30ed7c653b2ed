"""The cockpit: watches and steers a training run, from a terminal or from a script."""
