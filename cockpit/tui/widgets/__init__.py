"""One small file for each thing a screen shows."""
