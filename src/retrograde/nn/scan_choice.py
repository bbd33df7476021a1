"""Which scan a chain of layers is backpropagated by, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from retrograde.errors import ScanError
from retrograde.jacobians.feedforward import Algorithm, Split, Step, split_of
from retrograde.scan.counts import most_levels
from retrograde.units import format_bytes

__all__ = ["Outlook", "outlook_of"]


@dataclass(frozen=True, eq=False)
class Outlook:
    """Every scan that there is for a chain, what each takes, and which one is chosen.

    Attributes:
        chosen: the one that is.
        why: in a sentence.
        splits: all, from no levels on.
        jacobians: whether Jacobians are made; if not, the gradient goes back through the layers.
        room: bytes that Jacobians and products may take.
    """

    chosen: Split
    why: str
    splits: tuple[Split, ...]
    jacobians: bool
    room: int

    def __str__(self) -> str:
        rows = [("levels", "steps", "FLOPs", "critical path", "memory", "samples at a time")]
        for split in self.splits:
            rows.append(
                (
                    ("* " if split is self.chosen else "  ") + str(split.levels),
                    str(split.report.steps()),
                    f"{split.report.flops:.3g}",
                    f"{split.report.critical_flops:.3g}",
                    format_bytes(split.bytes),
                    str(split.samples) if split.samples else "does not fit",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([self.why, *lines])


def outlook_of(
    steps: Sequence[Step],
    algorithm: Algorithm,
    levels: int | None,
    room: int,
    *,
    whole: bool,
) -> Outlook:
    """Count what every scan takes, and choose.

    Args:
        steps: the layers, run on a batch.
        algorithm: what was asked for.
        levels: of ``"hybrid"``.
        room: bytes for Jacobians and products.
        whole: whether the gradient of the first one's input is wanted too.

    Returns:
        The outlook.

    Raises:
        ScanError: what was asked for does not fit.
    """
    x, y = steps[0].x, steps[-1].y
    paths = [step.path for step in (steps if whole else steps[1:])]
    size = prod(y.shape[1:]), len(x), x.dtype.itemsize, room
    most = most_levels(len(paths) + 1)
    asked = {"auto": range(most + 1), "linear": [0], "blelloch": [0, most]}.get(algorithm)
    found = [split_of(k, paths, *size) for k in asked or sorted({0, min(levels or 0, most)})]
    for path in paths:  # most of the products that were looked at will never be wanted
        for piece in path.pieces():
            piece.local.pattern.forget()
    linear, fitting = found[0], [split for split in found if split.samples]
    if algorithm == "auto":
        best = min(fitting, key=lambda s: s.report.critical_flops, default=linear)
        return Outlook(best, _why(best, len(fitting)), tuple(found), best.levels > 0, room)
    chosen = found[-1]
    if not chosen.samples:
        needed = chosen.fixed_bytes + chosen.sample_bytes
        size_of = chosen.problem or f"for one sample it takes {format_bytes(needed)}"
        raise ScanError(
            f"algorithm={algorithm!r} does not fit into {format_bytes(room)}: {size_of}; give more "
            "memory, fewer levels, or algorithm='auto'"
        )
    return Outlook(chosen, f"algorithm={algorithm!r} asks for it", tuple(found), True, room)


def _why(best: Split, fitting: int) -> str:
    if best.levels:
        return f"{best.levels} levels: the shortest critical path of those that fit, in FLOPs"
    reason = "no products shorten the critical path" if fitting > 1 else "no products fit"
    return f"linear, through the layers themselves, without Jacobians: {reason}"
