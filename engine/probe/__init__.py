"""Measures links, matrix products and memory on the ranks that it starts, and writes a hardware description."""
