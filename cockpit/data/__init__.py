"""The data of runs, as screens and commands use it: the store, its sources, metrics and texts. Imports no Textual."""
