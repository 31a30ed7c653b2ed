"""Histories of a run's measurements, in bounded memory. A client builds these histories while it follows the run,
because the state from a hub or from a recording contains only the newest records.
"""
