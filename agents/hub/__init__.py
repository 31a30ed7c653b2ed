"""Between the ranks and everyone who watches or steers: the hub of a run, and the relays of its nodes."""
