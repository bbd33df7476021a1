"""Blocks without a graph leave torch's settings alone, also where threads overlap."""

import threading

import torch

from retrograde.run.core import unrecorded


def test_blocks_of_two_threads_leave_attention_its_fast_path():
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with unrecorded():
            entered.set()
            left.wait()

    thread = threading.Thread(target=other, daemon=True)
    with unrecorded():
        thread.start()
        entered.wait()
    assert not torch.backends.mha.get_fastpath_enabled()
    left.set()
    thread.join()
    assert torch.backends.mha.get_fastpath_enabled()
