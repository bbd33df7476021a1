"""How the recurrent CUDA kernels are launched on a card, by its shared memory.

The limit is what one program may have: 232,448 bytes on sm_90 and sm_100, 166,912 on sm_80, 101,376
on sm_86, 89 and 120, 65,536 on sm_75. P is the power of two from 16 on that holds H, K the number
of gates. In shared memory are, as the compiler lays them out (a test compiles and compares):

- *products*: a product's operands, a tile of rows (R, P) and a Jacobian (P, P). For three products
  in TF32 that make one in float32, the rows are there twice;
- *carry*: P² numbers of each quadrant of a product, for every step that is loaded ahead;
- all of them: vectors of P numbers, one for each array and step loaded ahead, and P for each warp
  or gate, through which threads exchange numbers.

sm_75 cannot load ahead, so it has one stage. What does not fit with one stage is not launched.
"""

from typing import NamedTuple

__all__ = ["Launch", "launch"]

# Warps to a program, and stages of its pipeline, by P and by the number of gates.
_PREFERRED = {
    "products": {
        16: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
        32: {1: (2, 3), 3: (2, 3), 4: (2, 3)},
        64: {1: (4, 3), 3: (4, 3), 4: (8, 3)},
        128: {1: (8, 3), 3: (8, 2), 4: (16, 2)},
    },
    "carry": {
        16: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
        32: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
        64: {1: (4, 3), 3: (4, 3), 4: (8, 2)},
        128: {1: (8, 2), 3: (8, 2), 4: (8, 1)},
    },
    "sweep": {
        16: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
        32: {1: (1, 3), 3: (4, 3), 4: (4, 3)},
        64: {1: (4, 3), 3: (8, 3), 4: (8, 3)},
        128: {1: (8, 3), 3: (16, 3), 4: (16, 1)},
    },
}
# Cards with more shared memory, sm_80 and later, load ahead and have TF32.
_MODERN = 100_000


class Launch(NamedTuple):
    """P, rows of a tile, warps, stages, whether matrices are multiplied in three products in TF32,
    and the most bytes of shared memory that all this takes."""

    padded: int
    rows: int
    warps: int
    stages: int
    tf32: bool
    shared_bytes: int


def launch(kernel: str, gates: int, size: int, limit: int, tf32: bool = False) -> Launch | None:
    """How "products", "carry" or "sweep" is launched for K gates and H ≤ 128 units in float32, None
    if it does not fit; ``tf32`` allows the tensor cores."""
    padded = max(16, 1 << (size - 1).bit_length())
    warps, stages = _PREFERRED[kernel][padded][gates]
    rows = 16 if size * (2 if gates == 4 else 1) < 16 else 32
    modern = limit > _MODERN
    tf32 = tf32 and modern and kernel == "products" and padded < 128  # which would spill
    for tried in range(stages if modern else 1, 0, -1):
        numbers, vectors = padded * max(warps, 4), gates + 4
        if kernel == "products":
            numbers = padded * (padded + rows * (2 if tf32 else 1))
        elif kernel == "carry":
            vectors = padded * (4 if gates == 4 else 1) + 2
        taken = 4 * (numbers + (tried - 1) * padded * vectors)
        if taken <= limit:
            return Launch(padded, rows, warps, tried, tf32, taken)
    return None
