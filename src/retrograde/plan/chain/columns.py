"""A chain as the planner sees it: bytes that each of its moves needs, and forward seconds.

For each layer, u is the forward seconds, s its input state, and d that state's gradient. The part
of its internal state that is neither its input nor its output is p. The columns are:

===============  ====================================================================
``enter``        running a layer whose input is kept: s' + transient
``through``      running one whose input is only current: s + s' + transient
``record``       recording one whose input is kept: p + s' + transient
``back``         backpropagating it: p, s' if the tape refers to it, d', d + transient
===============  ====================================================================

where s' and d' belong to the layer's output. :func:`layers_of` can join several layers to one,
which is recorded whole or not at all.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrograde.schedule import Chain

__all__ = ["Layers", "layers_of"]

_Ints = NDArray[np.int64]


class Layers(NamedTuple):
    """Columns that the compiled planner reads; ``enter`` to ``back`` are in the module's table.

    Args:
        before: seconds of all layers before a state, shape (T + 1,).
        state: bytes of each state, shape (T + 1,).
        gradient: bytes of each state's gradient, shape (T + 1,); 0 at the end, where none
            exists yet.
        tape: bytes of each internal state without its input and output, shape (T,).
    """

    before: NDArray[np.float64]
    state: _Ints
    gradient: _Ints
    tape: _Ints
    enter: _Ints
    through: _Ints
    record: _Ints
    back: _Ints
    keeps_input: NDArray[np.bool_]
    keeps_output: NDArray[np.bool_]


def layers_of(chain: Chain, places: list[int] | None = None) -> Layers:
    """Return the columns of a chain. Layers between two neighbouring ``places`` are joined to one;
    None keeps each layer apart."""
    state, gradient = np.array(chain.state_bytes), np.array(chain.gradient_bytes)
    tape = np.array(chain.tape_bytes)
    inputs, outputs = np.array(chain.keeps_input), np.array(chain.keeps_output)
    enter = state[1:] + np.array(chain.forward_transient_bytes)
    record = tape + state[1:] + np.array(chain.record_transient_bytes)
    backward = gradient[:-1] + np.array(chain.backward_transient_bytes)
    back = tape + state[1:] * outputs + gradient[1:] + backward
    single = Layers(
        np.concatenate(([0.0], np.cumsum(chain.forward_seconds))), state,
        np.append(gradient[:-1], 0), tape, enter, state[:-1] + enter, record, back, inputs, outputs,
    )  # fmt: skip
    return single if places is None else _joined(single, places)


def _joined(layers: Layers, places: list[int]) -> Layers:
    first, last = np.array(places[:-1]), np.array(places[1:]) - 1
    tape, enter, through, record, back = (np.empty(len(first), np.int64) for _ in range(5))
    for group, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        passed = layers.through[begin + 1 : end + 1].max(initial=0)
        enter[group] = max(layers.enter[begin], passed)
        through[group] = max(layers.through[begin], passed)
        tape[group], record[group], back[group] = _recorded(layers, begin, end)
    return Layers(
        layers.before[places], layers.state[places], layers.gradient[places], tape, enter, through,
        record, back, layers.keeps_input[first], layers.keeps_output[last],
    )  # fmt: skip


def _recorded(layers: Layers, begin: int, end: int) -> tuple[int, int, int]:
    """Return the bytes that the recorded layers begin … end hold, and the peaks of both passes."""
    held = record = back = 0  # held: all tapes before layer k, and the states they refer to
    for k in range(begin, end + 1):
        refers = k > begin and (layers.keeps_output[k - 1] or layers.keeps_input[k])
        current = layers.state[k] if k > begin else 0
        record = max(record, held + current + layers.record[k])
        held += layers.state[k] if refers else 0
        back = max(back, held + layers.back[k])
        held += layers.tape[k]
    return int(held), int(record), int(back)
