"""What the hub finds in a run by itself: one class a subject, each over the run's state, none with a socket."""
