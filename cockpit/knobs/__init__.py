"""The knob board, the what-if and the autopilot, without a screen. Imports no Textual."""
