"""Run data for screens and commands: the store, the sources that fill it, metrics, and functions that format text.
Imports no Textual."""
