import pytest


@pytest.fixture(autouse=True)
def _by_roles(by_roles: None) -> None:
    """Whatever the test calls by tests.support.calls."""
