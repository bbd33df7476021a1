"""The layers of a chain, divided into units that a plan may drop, each tried and measured.

A layer that writes to its input (an in-place ReLU), or only reshapes it (``Flatten``), shares
memory with the layer before it. Both become one *unit*, so no later layer writes to what is kept.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrograde.errors import NotExactError
from retrograde.models.rows.arguments import Arguments, alone, made_by, tensors_in, tied
from retrograde.models.rows.call_sizes import PassMeasurements, Plans
from retrograde.models.rows.phases import do_most
from retrograde.models.rows.rerun import Recomputable
from retrograde.models.rows.trials import try_call
from retrograde.run.core import unsaved
from retrograde.schedule import Chain

Layers = Sequence[tuple[str, nn.Module]]
_MOST_UNITS = 200  # a plan for more takes long: neighbours are taken together
_WRITES = (
    "layer {} writes in place to {}, which is used again: expected it to leave that as it is; give "
    "it inplace=False, or let it return a new tensor"
)
NOTHING = (
    "there is nothing to backpropagate: expected a layer with a parameter, or an input, that "
    "requires a gradient, and no meta or fake tensors"
)


def measure_network(layers: Layers, input: object, repeats: int) -> Chain:
    """Return the bytes and seconds of each layer of a network, timed so many times."""
    weights = [p for _, layer in layers for p in layer.parameters()]
    if not any(t.requires_grad for t in (*tensors_in(input), *weights)):
        raise NotExactError(NOTHING)
    measurements = measured(layers, input, Plans(), repeats)
    sizes = measurements.sizes  # of calls that are kept whole
    internal, forward, record, backward = [], [], [], []
    for size in sizes:
        way, output = size.ways[0], size.output_bytes
        internal.append(way.held_bytes + output)
        forward.append(max(0, size.forward_bytes - size.noted_bytes - output))
        record.append(max(0, way.first_bytes - size.noted_bytes - internal[-1]))
        ends = size.input_bytes + output * (1 + way.keeps_output)
        backward.append(max(0, way.backward_bytes - way.held_bytes - ends))
    return Chain(
        forward_seconds=[size.forward_seconds for size in sizes],
        backward_seconds=[max(0.0, size.ordinary_seconds - size.forward_seconds) for size in sizes],
        output_bytes=[size.output_bytes for size in sizes],
        internal_bytes=internal,
        forward_transient_bytes=forward,
        record_transient_bytes=record,
        backward_transient_bytes=backward,
        keeps_input=[size.ways[0].keeps_input for size in sizes],
        keeps_output=[size.ways[0].keeps_output for size in sizes],
        names=[unit.name for unit in measurements.units],
        input_bytes=sizes[0].input_bytes,
        overhead_bytes=sum(size.noted_bytes + size.left_bytes for size in sizes),
    )


def measured(
    layers: Layers, input: object, plans: Plans, repeats: int | None = None
) -> PassMeasurements:
    """Divide layers into units, and try and measure each, on an input. A layer that cannot be run
    exactly is refused by its name."""
    together = -(-len(layers) // _MOST_UNITS)
    measurements = PassMeasurements(tied=tied(layer.parameters() for _, layer in layers))
    made, value = None, _alone(input)
    tried, result = _try(layers[:1], value)
    if tried.writes:
        raise NotExactError(_WRITES.format(layers[0][0], "the chain's input"))
    while layers:
        after, follows, size = tried, None, 1
        while size < len(layers):
            result = _result(tried, value) if result is None else result
            after, follows = _try(layers[size : size + 1], result)
            begins = not measurements.units and not tried.is_apart
            if after.is_apart and not (after.writes or begins or size < together):
                break
            size += 1
            tried, result = _try(layers[:size], value)
            if tried.writes:
                whose = "the chain's input"
                if measurements.units:
                    whose = f"what layer {layers[0][0]} was given"
                raise NotExactError(_WRITES.format(layers[size - 1][0], whose))
        modules, arguments = [layer for _, layer in layers[:size]], Arguments((value,))
        spare = [result, follows]  # computed once more, if they are not to be held meanwhile
        del result, follows
        sizes = plans.measure(tried, modules, arguments, made, measurements.tied, repeats, spare)
        measurements.add(tried, sizes)
        result, follows = spare or (None, None)
        if size < len(layers):
            value, result = _result(tried, value) if result is None else result, follows
            made = made_by(value, arguments.tensors)
        layers, tried = layers[size:], after
    measurements.settle()
    return measurements


def _try(layers: Layers, value: object) -> tuple[Recomputable, Any]:
    arguments, name = Arguments((value,)), "-".join(dict.fromkeys((layers[0][0], layers[-1][0])))
    if (reason := arguments.refusal()) is not None:
        raise NotExactError(f"layer {name} {reason}")
    modules = [layer for _, layer in layers]

    def forward(value: object) -> Any:
        for layer in modules:
            value = layer(value)
        return value

    return try_call(name, forward, modules, arguments)


def _result(unit: Recomputable, value: object) -> Any:
    """Run a unit, and leave no trace."""
    with unit.surroundings.measured(), unsaved():
        return _alone(do_most(unit, value))


def _alone(value: object) -> Any:
    """Return a value without the graph that it came from; its tensors require what they did."""
    return pytree.tree_map_only(Tensor, alone, value)
