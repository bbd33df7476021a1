"""Chains of unequal layers, by their sizes alone."""

import numpy as np

import retrograde as rg

__all__ = ["network", "random_chain"]


def random_chain(length: int, seed: int = 1) -> rg.Chain:
    """Layers as unequal as real ones: most tapes refer to an input, some to nothing."""
    draw = np.random.default_rng(seed)
    output = (2 ** draw.uniform(14, 21, length)).astype(int)
    tape = (output * draw.choice([0, 0, 1, 2, 0.5], length)).astype(int)
    forward = 10 ** draw.uniform(-4, -2, length)

    def transient() -> list[int]:
        return (output * draw.uniform(0, 0.5, length)).astype(int).tolist()

    return rg.Chain(
        forward_seconds=forward.tolist(),
        backward_seconds=(forward * draw.uniform(1, 3, length)).tolist(),
        output_bytes=output.tolist(),
        internal_bytes=(output + tape).tolist(),
        forward_transient_bytes=transient(),
        backward_transient_bytes=transient(),
        record_transient_bytes=transient(),
        keeps_input=(draw.random(length) < 0.7).tolist(),
        keeps_output=(draw.random(length) < 0.4).tolist(),
    )


def network(length: int) -> rg.Chain:
    """Convolution, norm, activation, sum, and again; images shrink and channels grow in between.

    All sizes are multiples of 32 KiB, but for what a norm keeps of its own.
    """
    columns: dict[str, list] = {name: [] for name in (
        "forward_seconds", "backward_seconds", "output_bytes", "internal_bytes",
        "forward_transient_bytes", "keeps_input", "keeps_output",
    )}  # fmt: skip
    for k in range(length):
        block, kind = divmod(k, 4)
        size = (6 * 2**20 >> min(3, 4 * k // length)) - 2**15 * (block % 7)
        seconds = size / 2e9 * (12, 1.5, 1, 1.2)[kind]
        row = (
            seconds, seconds * (2 if kind < 2 else 1), size, size + 2**16 * (kind == 1),
            size // 2 if kind == 0 else 0, kind < 2, kind == 2,
        )  # fmt: skip
        for column, entry in zip(columns.values(), row, strict=True):
            column.append(entry)
    return rg.Chain(**columns)
