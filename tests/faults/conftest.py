"""What the fault tests share: a hub of their own that may be killed, and things that are closed after the test."""

from tests.unit.agents.conftest import Opened, fleet, hub, opened, own_hub

__all__ = ["Opened", "fleet", "hub", "opened", "own_hub"]
