"""Run data for screens and commands: the store, its sources, metrics and texts. Imports no Textual."""
