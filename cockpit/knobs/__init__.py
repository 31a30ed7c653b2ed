"""The logic of the knob board, the what-if panel and the autopilot, independent of any screen. Imports no Textual."""
