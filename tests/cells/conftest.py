"""A fixture: a process without other threads."""

import pytest


@pytest.fixture
def alone(monkeypatch):
    """No other thread could draw random numbers, even if one of another test's is alive."""
    from retrograde.replay import surroundings

    monkeypatch.setattr(surroundings, "is_alone", lambda: True)
