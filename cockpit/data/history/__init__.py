"""Bounded histories of a run. A client builds these histories while it follows the run, because a hub and a recording
provide only the newest records.
"""
