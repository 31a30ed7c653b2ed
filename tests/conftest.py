"""Settings and fixtures for all tests."""

import pwd

import pytest
from hypothesis import settings

# Examples of Hypothesis have no deadline, because a busy machine can be slow; pytest-timeout limits each test.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file of unit tests on one xdist worker, because the tests of a file share module fixtures."""
    for item in items:
        if "unit" in item.path.parts and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test as a user without a home directory, as in many containers."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CONFIG_HOME", "COCKPIT_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
