"""In a rank's process: what it measures goes out, commands come in, and training never waits for either."""
