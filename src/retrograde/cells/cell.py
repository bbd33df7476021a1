"""Any cell as a core, called once per step; one trial step finds what the executor must know of it.

Before any work starts, the user's pytrees, closures or modules become a pure function of the inputs
and the state, on flat lists of tensors.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from retrograde.cells.captured import Outside, find_outside
from retrograde.errors import CellError
from retrograde.replay.surroundings import Surroundings, try_out, version
from retrograde.replay.trees import LEAF, Structure, Tensors, flatten, flatten_state
from retrograde.run.autograd_core import AutogradCore
from retrograde.run.layout import InMemory, Inputs, leaves_of
from retrograde.run.prints import Prints
from retrograde.run.settled import Settled
from retrograde.run.states import Like, device_of, each_once, entry, like_of, with_attributes
from retrograde.run.transforms import hooks_of_all

Cell = Callable[[Any, Any], tuple[Any, Any]]
_AFTER = "state that the cell returned"
_MOST_SETTLING = 8  # steps

Result = tuple[Tensors, Tensors, Structure, Structure]  # outputs, state, and their structures


@dataclass(frozen=True)
class StepCore(AutogradCore):
    """Any cell ``cell(x_t, state) -> (y_t, state)``, called once per step. :func:`examine` makes
    it."""

    cell: Cell
    input_spec: Structure
    state_spec: Structure
    output_spec: Structure
    state_like: tuple[Like, ...]
    output_like: tuple[Like, ...]
    outside: Outside
    surroundings: Surroundings
    aliases: tuple[int | None, ...]
    fused: bool = False
    output_is_total: bool = False
    without_outputs: Cell | None = None  # the cell without the work that only outputs need
    copied: tuple[bool, ...] = ()  # the parts of the state that it writes to: it is given clones
    first_spec: Structure | None = None  # of the initial state, if step 0 changes it to another
    first_like: tuple[Like, ...] = ()  # then of the initial state's tensors
    made: int = 0  # then the number of leaves that step 0 creates
    singly: bool = False  # whether each step is recorded by itself
    ragged: bool = False  # whether outputs may have other shapes at other steps
    settled: Settled = field(default_factory=Settled)

    @property
    def parameters(self) -> Tensors:
        return self.outside.parameters

    @property
    def targets(self) -> Tensors:
        return self.outside.targets

    @property
    def numbers(self) -> bool:  # type: ignore[override]
        return any(not shape and place.type == "cpu" for shape, _, place in self.state_like)

    @property
    def records_ranges(self) -> bool:
        return not self.singly and super().records_ranges

    def recording(self) -> AbstractContextManager[Any]:
        return self.outside.cut()

    @property
    def watched(self) -> bool:
        return not (self.fused or self.settled.walked)

    def prints(self, length: int) -> Prints | None:
        turn = self.settled.passes
        return None if self.fused else Prints(length, turn, self.surroundings, self.per_call)

    def complete(self) -> None:
        self.settled.complete()
        used = {id(t) for t in self.parameters}
        unused = any(t.requires_grad and id(t) not in used for t in self.surroundings.found.tensors)
        moves = self.surroundings.moves or self.surroundings.moving
        self.settled.walked = not (moves or self.numbers or unused)

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        arguments = self._arguments(inputs, state)
        outputs, states, output_spec, state_spec = _call(self.cell, *arguments)
        _check_like("state", states, state_spec, self.state_like, self.state_spec)
        if output_spec is state_spec is LEAF and outputs[0] is states[0] and self.aliases == (0,):
            return outputs, states
        like = [*map(like_of, outputs)] if self.ragged else self.output_like
        _check_like("output", outputs, output_spec, like, self.output_spec)
        if torch.is_grad_enabled() or self.settled.sweeps_without_graph:
            _check_aliases(outputs, states, self.aliases)
        return outputs, states

    def rerun(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        return _call(self.cell, *self._arguments(inputs, state))[:2]

    def next_state(self, inputs: Tensors, state: Tensors) -> Tensors:
        x, s = self._arguments(inputs, state)
        _, after = as_pair((self.without_outputs or self.cell)(x, s))
        return flatten_state(after, _AFTER)[0]

    def try_first(self, inputs: Inputs, state: Tensors) -> object:
        x, spec = leaves_of(inputs, 0), self.first_spec or self.state_spec
        return x, examine(self.cell, x, self.input_spec, state, spec)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether a step's input and state are a tensor each, taken as they are."""
        usual = self.first_spec is None and not self.copied
        return usual and self.input_spec is self.state_spec is LEAF

    def _arguments(self, inputs: Tensors, state: Tensors) -> tuple[Any, Any]:
        """Return the input and the state of a step, as the cell takes them."""
        if self._is_plain:
            return inputs[0], state[0]
        spec = self.state_spec
        if self.first_spec is not None and tuple(map(like_of, state)) == self.first_like:
            spec = self.first_spec
        if self.copied:
            state = _copied(state, self.copied)
        return self.input_spec.unflatten(inputs), spec.unflatten(state)


def examine(
    cell: Cell, inputs: Tensors, input_spec: Structure, state: Tensors, state_spec: Structure,
    made_of: Sequence[Any] | None = None,
) -> StepCore:  # fmt: skip
    """Make a cell's core from one trial step on its flat input and state; leave no trace.
    ``made_of``, by default the cell, is searched for captured tensors that require a gradient (rule
    5). It is searched for generators and buffers too (rules 2 and 3). Raises CellError if the cell
    cannot be run exactly (rule 6)."""
    if any(t.is_inference() for t in (*inputs, *state)):
        raise CellError(
            "the inputs or the state were made in inference mode: expected tensors that autograd "
            "can follow, for a gradient is wanted; clone() them, or make them under torch.no_grad"
        )
    x = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    made_of = [*([cell] if made_of is None else made_of), *hooks_of_all()]
    step = _Trying(cell, x, input_spec, state, state_spec)
    results, surroundings, mark = try_out(step, made_of, device_of(*state, *inputs))
    core = step.core(results[0])
    arguments, (outputs, states, *_) = [*x, *step.leaves], results[0]
    tensors = [t for ys, after, *_ in results for t in (*ys, *after)]
    core = replace(
        core,
        outside=find_outside(surroundings.found, tensors, mark, arguments),
        surroundings=surroundings,
        # Which part of the state each output is.
        aliases=tuple(next((j for j, t in enumerate(states) if t is y), None) for y in outputs),
        copied=step.copied if any(step.copied) else (),
    )
    if core.first_spec is None:
        return core
    # A cell whose step 0 makes the state may create leaves. Nothing refers to these once the trial
    # is released.
    pairs = zip(core.parameters, core.targets, strict=True)
    references = [(weakref.ref(p), None if t is p else t) for p, t in pairs]
    core = replace(core, outside=Outside([], []))
    results.clear()
    del pairs, outputs, states, tensors  # BUDGET: the trial
    kept = [(p, t) for reference, t in references if (p := reference()) is not None]
    parameters = [p for p, _ in kept]
    cut = any(t is not None for _, t in kept)
    targets = [p if t is None else t for p, t in kept] if cut else parameters
    return replace(core, outside=Outside(parameters, targets), made=len(references) - len(kept))


def later_state(core: StepCore, inputs: Inputs, state: Tensors) -> Tensors:
    """Return a state of the form that later steps have, to measure them by. Steps are run until no
    further part of the state requires a gradient. If the state has one precision before a step and
    another after it, the larger one is taken (rule 7)."""
    initial: Tensors = state
    if not core.fused:
        with core.surroundings.measured():
            for k in range(min(_MOST_SETTLING, len(inputs))):
                (after,) = core.advance(inputs, k, [k + 1], state, None)
                same = [t.requires_grad for t in after] == [t.requires_grad for t in state]
                state = after
                if same:
                    break
    if core.first_spec is not None:
        return state
    pairs = zip(state, initial, core.state_like, strict=True)
    return [s.to(torch.promote_types(was.dtype, like[1])) for s, was, like in pairs]


def largest_first(core: StepCore, inputs: Inputs, state: Tensors, step: int = 0) -> Inputs:
    """Return inputs that begin with the largest of a few steps, to measure by (rule 12)."""
    # A compiled block is one operation.
    if core.fused or core.per_call > 1 or not isinstance(inputs, InMemory):
        return inputs
    looked = {0, min(step, len(inputs) - 1), len(inputs) // 2, len(inputs) - 1}
    largest = max(sorted(looked), key=lambda k: _operations(core, inputs, state, k))
    return replace(inputs, first=largest)


def _operations(core: StepCore, inputs: Inputs, state: Tensors, step: int) -> int:
    """Return the number of operations that a step records, which is counted once."""
    settled, before = core.settled, core.settled.seen
    if step not in settled.counts:
        settled.seen = 0
        with core.surroundings.measured():
            core.advance(inputs, step, [step + 1], state, lambda *_: None)
        settled.counts[step], settled.seen = settled.seen, max(before, settled.seen)
    return settled.counts[step]


def idle_steps(core: StepCore, inputs: Inputs, state: Tensors) -> int:
    """Return how many steps record nothing before the first that does: those of a burn-in."""
    if core.fused or core.per_call > 1 or _operations(core, inputs, state, 0):
        return 0
    return bisect_left(range(len(inputs)), 1, key=lambda k: _operations(core, inputs, state, k))


def begin(
    cell: Cell, inputs: Tensors, input_spec: Structure, state: Tensors, state_spec: Structure
) -> tuple[StepCore, Tensors, Tensors]:
    """Run step 0 where nothing will be differentiated. Return a core without parameters, the
    outputs, and the state after. Raises CellError if the step changed the form of its state."""
    result = _call(cell, input_spec.unflatten(inputs), state_spec.unflatten(state))
    return _Trying(cell, inputs, input_spec, state, state_spec).core(result), *result[:2]


def changes_structure(result: Result, before: Tensors, spec: Structure) -> bool:
    """Return whether step 0 changed the structure of a state that held a None or a number."""
    _, states, _, after_spec = result
    differs = after_spec != spec and [*map(like_of, states)] != [*map(like_of, before)]
    return differs and any(kind is not Tensor for kind in spec.kinds)


@dataclass
class _Trying:
    """A trial of a cell: one step, or two if the first one changes the state's structure. It finds
    which parts of the state the cell writes to. The core clones these before each step. Raises
    CellError if the cell writes to an input, or changes the state's structure again."""

    cell: Cell
    inputs: Tensors
    input_spec: Structure
    state: Tensors
    state_spec: Structure
    clones: bool = False
    copied: tuple[bool, ...] = ()
    leaves: Tensors = field(default_factory=list)

    def __call__(self) -> list[Result]:
        # What a step might write to is a clone: the caller's own tensors stay as they are.
        def begun(t: Tensor) -> tuple[Tensor, Tensor]:
            return entry(t) if t.requires_grad else (with_attributes(t.clone(), t),) * 2

        pairs = each_once(begun, self.state)
        self.leaves = [leaf for leaf, _ in pairs]
        try:
            first, written = self._step([s for _, s in pairs], self.state_spec)
            results = [first]
            if changes_structure(first, self.state, self.state_spec):
                _, states, _, spec = first
                later, rerun = self._step(states, spec)
                _check_like("state", later[1], later[3], [*map(like_of, states)], spec)
                results.append(later)
                written = rerun if not any(written) else (True,) * len(rerun)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):  # such as a view of one
                raise
            if self.clones:
                raise CellError(_WRITES) from error
            self.clones = True
            return self()
        if self.clones or not any(written):
            self.copied = written
            _check_apart(results[-1], written)
            return results
        self.clones = True
        return self()

    def core(self, result: Result) -> StepCore:
        """Return a core whose steps return what step 0 did. It has no parameters yet."""
        outputs, states, output_spec, after_spec = result
        device = device_of(*self.state, *self.inputs)
        settles = changes_structure(result, self.state, self.state_spec)
        like = [*map(like_of, states if settles else self.state)]
        if not settles:
            if torch.is_autocast_enabled(device.type) and len(states) == len(self.state):
                # A float32 state often becomes half precision from step 0 on.
                for i, (t, was) in enumerate(zip(states, self.state, strict=True)):
                    if t.is_floating_point() and was.is_floating_point():
                        like[i] = was.shape, t.dtype, was.device
            _check_like("state", states, after_spec, like, self.state_spec)
        return StepCore(
            cell=self.cell,
            input_spec=self.input_spec,
            state_spec=after_spec,
            first_spec=self.state_spec if settles else None,
            first_like=tuple(map(like_of, self.state)),
            output_spec=output_spec,
            state_like=tuple(like),
            output_like=tuple(map(like_of, outputs)),
            outside=Outside([], []),
            surroundings=Surroundings(device),
            aliases=(None,) * len(outputs),
        )

    def _step(self, state: Tensors, spec: Structure) -> tuple[Result, tuple[bool, ...]]:
        """Return a step's results, and which parts of the state the step writes to."""
        x = [t[...] if t.requires_grad else t for t in self.inputs]
        s = [t.clone() for t in state] if self.clones else state
        versions = [version(t) for t in x], [version(t) for t in s]
        result = _call(self.cell, self.input_spec.unflatten(x), spec.unflatten(s))
        if versions[0] != [version(t) for t in x]:
            raise CellError(_WRITES)
        return result, tuple(version(t) != then for t, then in zip(s, versions[1], strict=True))


_WRITES = (
    "the cell writes in place to its input, or to a parameter: expected it to leave them as they "
    "are, because they are used again; return new tensors instead (x = x + 1, not x += 1)"
)


def _copied(state: Tensors, copied: Sequence[bool]) -> Tensors:
    if len(copied) != len(state):  # the initial state, of another structure
        copied = (True,) * len(state)
    return [t.clone() if copy else t for t, copy in zip(state, copied, strict=True)]


def _check_apart(result: Result, written: Sequence[bool]) -> None:
    """Refuse a state that a step writes to, if it shares memory with an output or another state."""
    outputs, states, *_ = result
    for i, (state, writes) in enumerate(zip(states, written, strict=False)):
        others = [*outputs, *states[:i], *states[i + 1 :]]
        memory = state.untyped_storage().data_ptr() if writes else 0
        if memory and any(t.untyped_storage().data_ptr() == memory for t in others):
            raise CellError(
                f"the cell writes in place to tensor {i} of its state, which shares its memory "
                "with an output or with another part of the state: expected it to leave its state "
                "as it is; return new tensors instead (h = h + 1, not h += 1), or clones"
            )


def as_pair(result: Any) -> tuple[Any, Any]:
    """Return what a cell returned; raise :class:`CellError` unless it is an output and a state."""
    if not isinstance(result, tuple) or len(result) != 2:
        actual = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise CellError(
            f"the cell returned {actual}: expected the pair (output, state); "
            "wrap it, for instance: lambda x, s: (lambda h: (h, h))(cell(x, s))"
        )
    return result


def _call(cell: Cell, x: Any, state: Any) -> Result:
    y, after = as_pair(cell(x, state))
    if type(y) is Tensor and type(after) is Tensor:
        return [y], [after], LEAF, LEAF
    outputs, output_structure = flatten(y, "output of the cell")
    states, state_structure = flatten_state(after, _AFTER)
    return outputs, states, output_structure, state_structure


def _check_like(
    name: str, leaves: Tensors, spec: Structure, like: Sequence[Like], like_spec: Structure
) -> None:
    if spec is not like_spec and spec != like_spec:
        raise CellError(
            f"the cell changed the structure of its {name}: expected {like_spec}, "
            f"got {spec}; return the same structure at every step"
        )
    for i, (leaf, (shape, dtype, device)) in enumerate(zip(leaves, like, strict=True)):
        if leaf.shape != shape or leaf.dtype is not dtype or leaf.device != device:
            raise CellError(
                f"the cell changed tensor {i} of its {name}: expected shape {tuple(shape)}, "
                f"{dtype} on {device}, got {tuple(leaf.shape)}, {leaf.dtype} on {leaf.device}; "
                "every step must return what it was given"
            )


def _check_aliases(outputs: Tensors, states: Tensors, aliases: Sequence[int | None]) -> None:
    """Check that outputs which are the state at step 0 are so at every step. The gradient of such
    an output is added where the next step uses the state."""
    for i, (y, alias) in enumerate(zip(outputs, aliases, strict=True)):
        if alias is not None and y is not states[alias]:
            raise CellError(
                f"tensor {i} of the cell's output is its new state at step 0, but another tensor "
                "at a later step: expected the same at every step; return state.clone() as output"
            )
