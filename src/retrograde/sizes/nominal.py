"""Nominal costs of kernels, by which plans are compared: measured once, and not on the user's
machine.

No clock is read, so a budget gives the same schedule, and the same sums, on every run.
``benchmarks/layers.py range_costs`` measures the calls and steps of kernels. The other costs are
judged by the plans of ``benchmarks/recurrent.py grid``. They are of two cores, in microseconds
unless another unit is named. For layers of W weights:

    forward step  = step + flops / rate
    advancing     = call + weight · W        a call, besides its steps
    recording     = record + weighed · W     a call, and one backward, besides their steps
    backward step = backward · forward step  beyond running it forward
"""

from typing import NamedTuple


class KernelCosts(NamedTuple):
    """The costs of a kernel, by the names above; rates in operations per microsecond."""

    step: float
    rate: float
    backward: float
    call: float
    record: float
    weight: float = 0.0
    weighed: float = 0.0


# These include what the executor adds to a call: some 40 µs to advance, and 130 µs to record and to
# backpropagate.
CPU = {
    "LSTM": KernelCosts(step=1.2, rate=1.6e5, backward=2.2, call=130, record=500),
    "GRU": KernelCosts(step=14, rate=1.1e5, backward=3.0, call=70, record=300),
    "RNN": KernelCosts(step=5, rate=1.1e5, backward=3.0, call=70, record=260),
    "compiled": KernelCosts(
        step=0.2, rate=1.35e5, backward=2.0, call=130, record=600, weight=9e-4, weighed=5e-3
    ),
}
# These are not measured. On a GPU launches cost time, and arithmetic hardly does.
CUDA = KernelCosts(step=5, rate=2e7, backward=2.0, call=100, record=400)

# In forward steps of held layers: a call that advances, and one that records a range and
# backpropagates it.
CALL_STEPS, RECORD_STEPS = 5.0, 15.0
# In forward steps of a cell of a dozen small operations: recording a range as one graph and
# backpropagating it, besides its steps. It is mostly a call of autograd's engine.
RECORD_GRAPH_STEPS = 6.0

# Of held layers: operations per microsecond, elementwise work per number of a gate, and a call that
# runs a range.
RATE, ELEMENT, CALL = 1.35e5, 2.5e-3, 100.0
# A span of a layer, and each of its weights. The key says whether one loop runs the backward pass,
# over enough rows at a time: it sums the gradients of weights separately.
SPAN: dict[bool, tuple[float, float]] = {True: (180.0, 3e-4), False: (230.0, 1.1e-3)}
# How much longer products with hidden weights take where these lie in place: forward, and in
# addition by the number of units; and backward.
IN_PLACE, FEW_UNITS, BACK_IN_PLACE = 0.1, 32.0, 0.2
SWEEPS = 0.6  # forward passes that a GRU's separate sweeps cost more than one loop

# oneDNN runs torch's LSTM in single precision, if lengths are equal. Above so many weights it is as
# fast as ours. Below so many steps torch's own pass is faster, since our calls cost more. But above
# so many states it asks the system for memory at every call.
ONEDNN_WEIGHTS, FEW_STATES = 1.4e6, 2**19
FEW_STEPS = {"oneDNN": 128, "LSTM": 10, "GRU": 10, "RNN_TANH": 20, "RNN_RELU": 20, "GPU": 2000}

# Single layers of up to so many units, by the number of gates, are swept faster by our kernels than
# by cuDNN. Above so many samples a GPU does not run all at once. This was measured with 20 and 64
# units on an H100. In few steps our calls cost more. What a call of cuDNN costs is not measured.
SWEPT_UNITS, SWEPT_SAMPLES, VENDOR = {1: 64, 3: 64, 4: 32}, 128, 80.0
