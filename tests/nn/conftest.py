"""``backward="auto"`` measures and keeps what it measured: in a folder of the test's own."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a process that has measured nothing yet."""
    from retrograde.nn import calibration

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_KNOWN", {})
    return tmp_path / "cache"
