"""The hub, which connects the ranks of a run with its clients, and the relays, one per node."""
