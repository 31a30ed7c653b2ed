"""Run data for screens and commands: the store, the connections and recordings that fill it, metrics, and functions
that format text. Imports no Textual."""
