"""The elementwise mathematics of torch's cells on a CPU, over vectors of lanes.

Each formula stands here once; the loops load its operands and store its results. The legend is that
of :mod:`retrograde.kernels.cells`.

A cell is two functions. ``run(gates, state, units)`` returns the state after a step, h first, and
what stands in for the gates if they are kept. ``pull(gates, state, after, units, g)`` returns the
gradients of what a step reads, given g of the state after it. ``state`` is that before the step,
and ``after`` is h after it. The gradients are four tuples: of gates, of h, of other parts
of the state, and of units. Gates are in the order of a buffered row. Paths through U are left out.
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

Vectors = tuple[Vector, ...]
#: What ``run`` returns, and what ``pull`` returns.
Ran = tuple[Vectors, Vectors]
Pulled = tuple[Vectors, Vectors, Vectors, Vectors]


@inlined
def run_tanh(gates: Vectors, state: Vectors, units: Vectors) -> Ran:
    """Run an RNN with tanh."""
    return (tanh(gates[0]),), ()


@inlined
def pull_tanh(gates: Vectors, state: Vectors, after: Vector, units: Vectors, g: Vectors) -> Pulled:
    """Backpropagate an RNN with tanh."""
    return (g[0] * (like(after, 1) - after * after),), (), (), ()


@inlined
def run_relu(gates: Vectors, state: Vectors, units: Vectors) -> Ran:
    """Run an RNN with ReLU."""
    return (positive(gates[0]),), ()


@inlined
def pull_relu(gates: Vectors, state: Vectors, after: Vector, units: Vectors, g: Vectors) -> Pulled:
    """Backpropagate an RNN with ReLU."""
    return (g[0] * one_above(after),), (), (), ()


@inlined
def gru_gates(r: Vector, z: Vector, driven: Vector, m: Vector) -> tuple[Vector, Vector, Vector]:
    """Return r, z and n from the sums of r and of z, and the two parts of n's sum."""
    reset = sigmoid(r)
    return reset, sigmoid(z), tanh(driven + reset * m)


@inlined
def gru_slopes(
    r: Vector, z: Vector, n: Vector, m: Vector, h: Vector
) -> tuple[Vector, Vector, Vector, Vector]:
    """Return s_r, s_z, s_m and s_n; ``h`` is that before the step."""
    one = like(r, 1)
    inner = (one - z) * (one - n * n)
    return inner * m * r * (one - r), (h - n) * z * (one - z), inner * r, inner


@inlined
def run_gru(gates: Vectors, state: Vectors, units: Vectors) -> Ran:
    """Run a GRU, whose gates are r, z, and n in two parts."""
    _, z, n = gru_gates(gates[0], gates[1], gates[2], gates[3])
    return (n + z * (state[0] - n),), ()


@inlined
def pull_gru(gates: Vectors, state: Vectors, after: Vector, units: Vectors, g: Vectors) -> Pulled:
    """Backpropagate a GRU; a buffered row has r, z, m and n."""
    r, z, n = gru_gates(gates[0], gates[1], gates[2], gates[3])
    s_r, s_z, s_m, s_n = gru_slopes(r, z, n, gates[3], state[0])
    d = g[0]
    return (d * s_r, d * s_z, d * s_m, d * s_n), (d * z,), (), ()


@inlined
def lstm_gates(i: Vector, f: Vector, g: Vector, o: Vector) -> tuple[Vector, Vector, Vector, Vector]:
    """Return the gates from the sums that enter them."""
    return sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)


@inlined
def lstm_slopes(
    i: Vector, f: Vector, g: Vector, o: Vector, c: Vector, h: Vector
) -> tuple[Vector, Vector, Vector, Vector, Vector]:
    """Return s_i, s_f, s_g, s_o and e; ``c`` is before the step, and ``h`` after it."""
    one = like(i, 1)
    tanh_c = quotient(h, o)  # h = o tanh c; each use is times o, which may be 0
    s_i, s_f, s_g = g * i * (one - i), c * f * (one - f), i * (one - g * g)
    return s_i, s_f, s_g, tanh_c * o * (one - o), o * (one - tanh_c * tanh_c)


@inlined
def run_lstm(gates: Vectors, state: Vectors, units: Vectors) -> Ran:
    """Run an LSTM. It keeps i, f, g and o."""
    i, f, g, o = lstm_gates(gates[0], gates[1], gates[2], gates[3])
    c = f * state[1] + i * g
    return (o * tanh(c), c), (i, f, g, o)


@inlined
def pull_lstm(gates: Vectors, state: Vectors, after: Vector, units: Vectors, g: Vectors) -> Pulled:
    """Backpropagate an LSTM, given i, f, g and o."""
    i, f, n, o = gates
    s_i, s_f, s_g, s_o, through = lstm_slopes(i, f, n, o, state[1], after)
    d = g[0]
    dc = g[1] + d * through
    return (dc * s_i, dc * s_f, dc * s_g, d * s_o), (), (dc * f,), ()
