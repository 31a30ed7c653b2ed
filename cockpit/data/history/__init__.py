"""Bounded histories of a run, kept while a client follows it: a hub and a recording give only the newest records."""
