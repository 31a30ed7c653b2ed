"""Settings of all tests."""

from hypothesis import settings

# A busy machine takes its time: no example has a deadline, pytest-timeout has an eye on the whole.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
