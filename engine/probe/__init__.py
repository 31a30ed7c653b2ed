"""Measures links, matmuls and memory on the ranks that it starts, and writes a hardware description."""
