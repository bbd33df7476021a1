"""Two runs in float64, by torch's backward pass and by the scan."""

import json

from wang2020.bitstream_float64 import SHIPPED, race


def test_torch_and_the_scan_stay_together():
    found = race(4, length=50, batch=4)
    assert found["distances"][-1] < 1e-14


def test_what_is_shipped_is_a_whole_run_of_the_papers_rate():
    found = json.loads(SHIPPED.read_text())
    assert len(found["losses"]) == len(found["distances"]) == found["iterations"] // found["every"]
    assert found["length"] == 1000
    assert found["learning_rate"] == 3e-5
    assert found["distances"] == sorted(found["distances"])
