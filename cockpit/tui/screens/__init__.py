"""Screens: what fills the terminal, and what opens over it."""
