"""The logic of the knob board, the what-if and the autopilot, independent of any screen. Imports no Textual."""
