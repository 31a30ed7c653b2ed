"""The hub of a run, which connects its ranks with its clients, and the relays of its nodes."""
