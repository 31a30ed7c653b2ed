"""The hub of a run, between its ranks and its clients, and the relays of its nodes."""
