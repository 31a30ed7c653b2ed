"""Measures links, products and memory of the ranks at hand and writes a hardware description."""
