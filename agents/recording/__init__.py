"""The recording of a run in SQLite: format, writing, reading, replay."""
