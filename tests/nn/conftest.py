"""Fixtures: a folder for what ``backward="auto"`` measured, and a process without other threads."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a process that has measured nothing yet."""
    from retrograde.nn import calibration

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_KNOWN", {})
    return tmp_path / "cache"


@pytest.fixture
def alone(monkeypatch):
    """No other thread could draw random numbers, even if one of another test's is alive."""
    from retrograde.discover import surroundings

    monkeypatch.setattr(surroundings, "is_alone", lambda: True)
