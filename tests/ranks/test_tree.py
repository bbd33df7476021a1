"""The scan across ranks, between threads with queues, against the plain loop."""

import math
import threading
from queue import Queue

import pytest
import torch

from retrograde.ranks.tree import joined, scan
from retrograde.scan.blelloch import pairs

SIZES = range(1, 17)


class Threads:
    """The links of one rank in a thread; it counts what it sends, and the longest chain of
    messages that led to it, as Lamport's clock does."""

    def __init__(self, rank, boxes):
        self.rank, self.size, self.boxes = rank, len(boxes), boxes
        self.sent, self.clock = [], 0

    def send(self, tensor, to):
        self.boxes[self.rank][to].put((self.clock + 1, tensor.clone()))
        self.sent.append((to, tensor.shape[1]))

    def receive(self, like, source):
        then, tensor = self.boxes[source][self.rank].get(timeout=20)
        assert tensor.shape == like.shape
        self.clock = max(self.clock, then)
        return tensor

    def flush(self):
        pass


def scanned(elements):
    """What each rank finds, and its links; the last rank has the gradient."""
    size = len(elements)
    boxes = [[Queue() for _ in range(size)] for _ in range(size)]
    peers = [Threads(rank, boxes) for rank in range(size)]
    found = [None] * size

    def run(rank):
        found[rank] = scan(elements[rank], peers[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, peers


def drawn(size, samples=2, n=3):
    torch.manual_seed(size)
    rows = [torch.randn(samples, n + 1, n, dtype=torch.float64) for _ in range(size)]
    return [*rows[:-1], rows[-1][:, -1:]]


@pytest.mark.quick(6)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_gradient_that_reaches_it(size):
    elements = drawn(size)
    found, _ = scanned(elements)
    assert found[-1] is None
    g = elements[-1]
    for rank in range(size - 2, -1, -1):
        torch.testing.assert_close(found[rank], g, rtol=1e-12, atol=1e-12)
        g = g @ elements[rank][:, :-1] + elements[rank][:, -1:]


@pytest.mark.quick(6)
@pytest.mark.parametrize("size", SIZES)
def test_messages_and_rounds_are_those_of_the_algorithm(size):
    _, peers = scanned(drawn(size))
    matrices = [sum(rows > 1 for _, rows in each.sent) for each in peers]
    assert max(matrices) <= 1
    rounds = math.ceil(math.log2(size))
    every = [half >= 2**d for d in range(rounds) for half, _ in pairs(size - 1, d)]
    up, down = len(every), sum(every)
    assert sum(len(each.sent) for each in peers) == up + down
    longest = max(each.clock for each in peers)
    assert rounds <= longest <= max(2 * rounds - 1, 0)


def test_joined_ranges_are_one_range():
    a, b, c = (torch.randn(2, 4, 3, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(joined(joined(a, b), c), joined(a, joined(b, c)))
    g = torch.randn(2, 1, 3, dtype=torch.float64)
    torch.testing.assert_close(joined(joined(g, a), b), joined(g, joined(a, b)))
