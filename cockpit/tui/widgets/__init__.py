"""Panels and other widgets, one file each."""
