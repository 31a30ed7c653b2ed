"""Bounded histories of a run, kept while a client follows it, because a hub and a recording provide only the
newest records.
"""
