"""What is compiled once is not compiled again by a first call."""

import os
import subprocess
import sys

import pytest

from retrograde import precompile

FIRST_CALLS = """
import torch
import retrograde as rg

rg.plan(3000, 30, policy="msm", alpha=5, beta=4)
rg.plan(300, 30, policy="best", alpha=1)
for kind in (rg.RNN, rg.GRU, rg.LSTM):
    for options in ({"memory": "50%"}, {"backward": "scan"}):
        kind(4, 6, **options)(torch.randn(80, 2, 4))[0].sum().backward()
"""


def run(*arguments, cache):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, *arguments], env=environment, check=True, timeout=600)
    return {path.name for path in cache.rglob("*.nbc")}


@pytest.mark.slow
def test_first_calls_compile_nothing_after_it(tmp_path):
    compiled = run("-m", "retrograde.precompile", cache=tmp_path)
    assert len(compiled) > 100
    assert run("-c", FIRST_CALLS, cache=tmp_path) == compiled


def test_it_says_how_long_it_took(monkeypatch, capsys):
    done = []
    monkeypatch.setattr(precompile, "precompile", lambda: done.append(1))
    precompile.main()
    assert "compiled in 0 s" in capsys.readouterr().out
    assert done == [1]
