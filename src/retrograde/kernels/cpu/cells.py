"""The elementwise mathematics of torch's cells on a CPU, over vectors of lanes.

Each formula stands here once; the loops of ``forward_loops``, ``slope_loops`` and
``backward_loops`` load its operands and store its results. The legend is that of
:mod:`retrograde.kernels.cells`.
"""

from retrograde.kernels.cpu.llvm.lanes import (
    Vector,
    inlined,
    like,
    one_above,
    positive,
    quotient,
    sigmoid,
    tanh,
)

Three = tuple[Vector, Vector, Vector]
Four = tuple[Vector, Vector, Vector, Vector]


@inlined
def rnn_state(total: Vector, relu: bool) -> Vector:
    """Return the state from the sum that enters it."""
    return positive(total) if relu else tanh(total)


@inlined
def rnn_slope(state: Vector, relu: bool) -> Vector:
    """Return s from the state after the step."""
    return one_above(state) if relu else like(state, 1) - state * state


@inlined
def gru_gates(r: Vector, z: Vector, driven: Vector, m: Vector) -> Three:
    """Return r, z and n from the sums of r and of z, and the two parts of n's sum."""
    reset = sigmoid(r)
    return reset, sigmoid(z), tanh(driven + reset * m)


@inlined
def gru_slopes(r: Vector, z: Vector, n: Vector, m: Vector, h: Vector) -> Four:
    """Return s_r, s_z, s_m and s_n; ``h`` is that before the step."""
    one = like(r, 1)
    inner = (one - z) * (one - n * n)
    return inner * m * r * (one - r), (h - n) * z * (one - z), inner * r, inner


@inlined
def lstm_gates(i: Vector, f: Vector, g: Vector, o: Vector) -> Four:
    """Return the gates from the sums that enter them."""
    return sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)


@inlined
def lstm_slopes(
    i: Vector, f: Vector, g: Vector, o: Vector, c: Vector, h: Vector
) -> tuple[Vector, ...]:
    """Return s_i, s_f, s_g, s_o and e; ``c`` is before the step, and ``h`` after it."""
    one = like(i, 1)
    tanh_c = quotient(h, o)  # h = o tanh c; each use is times o, which may be 0
    s_i, s_f, s_g = g * i * (one - i), c * f * (one - f), i * (one - g * g)
    return s_i, s_f, s_g, tanh_c * o * (one - o), o * (one - tanh_c * tanh_c)
