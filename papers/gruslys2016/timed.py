"""Figure 2(b) of Gruslys et al. (2016): what a step takes in seconds, measured.

The paper's case: an LSTM from 256 to 256, batch 64, forward and backward of one gradient step, HSM
with as many hidden states as in figure 2(a). The numbers drawn are those of the file
``data/figure_2b.json`` unless others are given; its machine is named in the picture.
:mod:`gruslys2016.processes` makes such a file, by :func:`gruslys2016.measured.measure_seconds`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from retrograde.figures.style import GREY, tidy
from retrograde_papers.curves import BLUE, CYAN, GREEN, RED, VIOLET, draw_curves
from retrograde_papers.numbers import read_shipped
from retrograde_papers.plates import Column, Plate, captioned, describe_machine

__all__ = ["Seconds", "figure_2b"]


@dataclass(frozen=True)
class Seconds:
    """Medians of the seconds of one gradient step.

    Attributes:
        machine: what they were measured on; ``"device"`` names it.
        inputs: size of an input of the LSTM.
        hidden: size of its hidden state.
        batch: sequences side by side.
        rounds: times that each was measured, all in turn.
        lengths: steps of the sequences.
        ordinary: seconds of ``torch.nn.LSTM``, one for each length.
        budgeted: likewise of HSM, by its memory in hidden states.
        processes: how many processes measured, where these are the least of their medians.

    Example:
        >>> seconds = Seconds({"device": "abacus"}, 2, 2, 1, 1, (5,), (0.5,), {10: (0.6,)})
        >>> Seconds.from_json(seconds.to_json()) == seconds
        True
    """

    machine: Mapping[str, str | int]
    inputs: int
    hidden: int
    batch: int
    rounds: int
    lengths: tuple[int, ...]
    ordinary: tuple[float, ...]
    budgeted: Mapping[int, tuple[float, ...]]
    processes: int = 1

    @staticmethod
    def least(measured: "Sequence[Seconds]") -> "Seconds":
        """The least of the medians that several processes measured.

        Where memory lies badly in one process and stays so, only another process helps.

        Example:
            >>> one = Seconds({}, 2, 2, 1, 1, (5,), (0.5,), {10: (0.9,)})
            >>> two = Seconds({}, 2, 2, 1, 1, (5,), (0.6,), {10: (0.8,)})
            >>> Seconds.least([one, two]).ordinary, Seconds.least([one, two]).budgeted
            ((0.5,), {10: (0.8,)})
        """
        return replace(
            measured[0],
            ordinary=tuple(map(min, zip(*(each.ordinary for each in measured), strict=True))),
            budgeted={
                m: tuple(map(min, zip(*(each.budgeted[m] for each in measured), strict=True)))
                for m in measured[0].budgeted
            },
            processes=len(measured),
        )

    def to_json(self) -> str:
        """The numbers as JSON, the seconds to six digits."""
        document = asdict(self)
        document["ordinary"] = _rounded(self.ordinary)
        document["budgeted"] = {str(m): _rounded(column) for m, column in self.budgeted.items()}
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Seconds":
        """The numbers that :meth:`to_json` wrote."""
        document = json.loads(text)
        for name in ("lengths", "ordinary"):
            document[name] = tuple(document[name])
        document["budgeted"] = {int(m): tuple(c) for m, c in document["budgeted"].items()}
        return cls(**document)


def figure_2b(seconds: Seconds | None = None) -> Plate:
    """Figure 2(b): the measured time of a step, forward and backward, under HSM.

    Example:
        >>> figure_2b().name
        'figure_2b'
    """
    found = seconds or Seconds.from_json(read_shipped("gruslys2016", "figure_2b"))
    lengths = np.array(found.lengths)
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        lengths, 1e3 * np.array(found.ordinary) / lengths, color=GREY, linewidth=1.8, marker="o",
        markersize=3.5, label="no limit (torch.nn.LSTM)",
    )  # fmt: skip
    curves = {
        f"{m:,}": (colour, 1e3 * np.array(column) / lengths)
        for (m, column), colour in zip(
            found.budgeted.items(), (RED, GREEN, BLUE, VIOLET, CYAN), strict=False
        )
    }
    draw_curves(axes, lengths, curves, "hidden states in memory")
    for line in axes.lines:
        line.set_marker("o")
        line.set_markersize(3.5)
    axes.set_xlim(0.93 * found.lengths[0], 1.07 * found.lengths[-1])  # whole markers
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
    size = f"{found.inputs}→{found.hidden}, batch {found.batch}"
    tidy(axes, title=f"HSM, measured: one gradient step of an LSTM {size}",
         x="sequence length t (steps)", y="time (ms per step)")  # fmt: skip
    note = (
        f"Forward and backward, divided by the length. Medians of {found.rounds} rounds, in turn "
        f"in one process{_of_several(found.processes)}, on {describe_machine(found.machine)}."
    )
    table: dict[str, Column] = {"length": found.lengths, "torch.nn.LSTM (s)": found.ordinary}
    table |= {f"HSM, {m} hidden states (s)": column for m, column in found.budgeted.items()}
    return captioned("figure_2b", "seconds of a gradient step, measured", table, figure, note)


def _of_several(processes: int) -> str:
    return "" if processes == 1 else f", and of {processes} such processes the least"


def _rounded(column: tuple[float, ...]) -> list[float]:
    return [float(f"{value:.6g}") for value in column]
