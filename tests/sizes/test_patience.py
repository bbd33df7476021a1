"""What is said where measuring takes long."""

import sys
import time

import pytest

from retrograde.sizes import cache as module
from retrograde.sizes.cache import LRUCache


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_a_slow_measurement_says_so_once_on_a_terminal(terminal, slow, monkeypatch, capsys):
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    cache: LRUCache[int] = LRUCache()

    def find() -> int:
        time.sleep(0.3 if slow else 0)
        return cache.get("inner", lambda: 1)

    assert cache.get("outer", find) == 1
    said = capsys.readouterr().err
    assert said.count("a first call of this kind") == (terminal and slow)
