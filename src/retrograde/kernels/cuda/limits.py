"""Choose how the recurrent CUDA kernels are launched on a card, by its shared memory.

The limit is the shared memory of one program. It is 232,448 bytes on sm_90 and sm_100, 166,912 on
sm_80, 101,376 on sm_86, 89 and 120, and 65,536 on sm_75. P is the least power of two from 16 on
that is no less than H, and K is the number of gates. Shared memory holds these arrays, as the
compiler lays them out (a test compiles and compares):

- *products*: the operands of a product, which are a tile of rows (R, P) and a Jacobian (P, P). If
  three products in TF32 replace one in float32, the rows are there twice;
- *carry*: P² numbers of each quadrant of a product, for every step that is loaded ahead;
- *step* (of layers with more than 128 units): tiles of gradients and weights, for every part
  of the product that is loaded ahead;
- all others: a vector of P numbers for each array and each step that is loaded ahead. Besides, P
  numbers for each warp or gate, through which threads exchange values.

sm_75 cannot load ahead, so it has one stage. A kernel that does not fit with one stage is not
launched.
"""

from typing import NamedTuple

#: The largest H for which a CUDA program can hold a layer on the chip. A wider layer is swept by
#: one launch a step, and has no compiled scan.
LARGEST_SIZE = 128

# The warps of a program and the stages of its pipeline, by P and by the number of gates.
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
# A step of a wide layer has tiles of 32 if there are this many of them, and of 16 otherwise.
_MANY_TILES = 128
# Cards with more shared memory than this, sm_80 and later, can load ahead and have TF32.
_MODERN = 100_000


class Launch(NamedTuple):
    """How a kernel is launched. ``padded`` is P, and ``rows`` are those of a tile. ``tf32`` means
    that a matrix product is three products in TF32. ``shared_bytes`` is the most shared memory that
    the launch takes."""

    padded: int
    rows: int
    warps: int
    stages: int
    tf32: bool
    shared_bytes: int


def launch(kernel: str, gates: int, size: int, limit: int, tf32: bool = False) -> Launch | None:
    """Return how "products", "carry" or "sweep" is launched, or None if it does not fit. A forward
    pass is launched as a sweep. ``gates`` is K, and ``size`` is H ≤ 128. ``tf32`` allows the tensor
    cores. The dtype is float32."""
    padded = max(16, 1 << (size - 1).bit_length())
    warps, stages = _PREFERRED[kernel][padded][gates]
    tile_rows = 16 if size * (2 if gates == 4 else 1) < 16 else 32
    modern = limit > _MODERN
    tf32 = tf32 and modern and kernel == "products" and padded < 128  # 128 would spill registers
    for tried in range(stages if modern else 1, 0, -1):
        numbers, vectors = padded * max(warps, 4), gates + 4
        if kernel == "products":
            numbers = padded * (padded + tile_rows * (2 if tf32 else 1))
        elif kernel == "carry":
            vectors = padded * (4 if gates == 4 else 1) + 2
        taken = 4 * (numbers + (tried - 1) * padded * vectors)
        if taken <= limit:
            return Launch(padded, tile_rows, warps, tried, tf32, taken)
    return None


def step_launch(
    samples: int, gates: int, size: int, limit: int, tf32: bool = False
) -> dict[str, int]:
    """Return the options of a wide layer's step: its tile, warps, stages, and whether it has TF32.
    ``gates`` is K, and ``size`` is H, any number. The dtype is float32."""
    modern, many = limit > _MODERN, -(-samples // 32) * -(-size // 32) >= _MANY_TILES
    tf32 = tf32 and modern
    return {
        "TILE": 32 if many else 16,
        "DEPTH": 64 if tf32 and not many else 32,
        "TF32": tf32,
        "STAGES": 3 if modern else 1,
        "num_warps": 8 if many and gates > 1 and not tf32 else 4,
    }
