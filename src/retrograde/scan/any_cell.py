"""Any cell by a scan: its transposed Jacobians by batched vector-Jacobian products.

Forward, the cell is run step by step. Backward, it is called once for all steps of a block, with
time and batch as one dimension. A vector-Jacobian product for every unit vector of the state gives
the Jacobians of all steps and samples. Then g_t = d_t + J_{t+1}ᵀ g_{t+1} is scanned in chunks, as
in :mod:`retrograde.kernels.sweep`. One more product, with every g at once, gives the gradients
of inputs and parameters.

This takes n + 2 products for a state of n numbers, and T·B·n² numbers for the Jacobians of a block.
The cell must treat the samples (the first dimension) independently and draw no random numbers. Both
are checked: the call for all steps must return the states of the single steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import CellError, RetrogradeError
from retrograde.kernels.sweep import carry, trusted
from retrograde.replay.trees import Tensors

#: Maps the flat inputs and state of one step to its flat outputs and state.
StepFunction = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]

_BLOCK_BYTES = 64 * 2**20  # for the Jacobians of a block


def run_cell(
    step: StepFunction, parameters: Sequence[Tensor], inputs: Tensors, state: Tensors, chunk: int
) -> tuple[Tensors, Tensors]:
    """Run a cell over a sequence; a scan computes its gradient.

    Args:
        step: one step of any number of samples, on flat lists of tensors (B, …).
        parameters: every other tensor that receives a gradient.
        inputs: all steps, (T, B, …).
        state: the initial state, (B, …), all of it real.
        chunk: steps in a chunk of the scan.

    Returns:
        The outputs, stacked (T, B, …), and the state after the last step.

    Raises:
        CellError: the samples depend on one another, or the step is random.

    Example:
        >>> cell = torch.nn.GRUCell(3, 5)
        >>> x, h = [torch.randn(20, 2, 3)], [torch.zeros(2, 5)]
        >>> def step(x, h):
        ...     after = cell(x[0], h[0])
        ...     return [after], [after]
        >>> (ys,), (last,) = run_cell(step, list(cell.parameters()), x, h, 4)
        >>> ys.sum().backward()
        >>> ys.shape, cell.weight_hh.grad.shape
        (torch.Size([20, 2, 5]), torch.Size([15, 5]))
    """
    counts = len(inputs), len(state)
    results = _Cell.apply(step, chunk, counts, *inputs, *state, *parameters)  # type: ignore[no-untyped-call]
    return list(results[: -len(state)]), list(results[-len(state) :])


class _Cell(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: StepFunction, chunk: int, counts: tuple[int, int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.chunk, ctx.counts = step, chunk, counts
        inputs, state, _ = _split(tensors, counts)
        outputs, states = [], [state]
        _check_independent(step, [x[0] for x in inputs], state)
        for x in zip(*inputs, strict=True):
            y, state = step(list(x), state)
            outputs.append(y)
            states.append(state)
        whole = [torch.stack(parts) for parts in zip(*outputs, strict=True)]
        kept = [torch.stack(parts) for parts in zip(*states, strict=True)]
        ctx.save_for_backward(*tensors, *kept)
        return *whole, *(s.clone() for s in state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RetrogradeError(
                "the gradient of a scanned cell cannot itself be differentiated: expected "
                "create_graph=False; for second derivatives use backward=None (ordinary BPTT)"
            )
        count = sum(ctx.counts)
        saved = ctx.saved_tensors
        rest = len(ctx.needs_input_grad) - 3 - count
        inputs, _, parameters = _split(saved[: count + rest], ctx.counts)
        backward = _Backward(ctx.step, ctx.chunk, inputs, list(saved[count + rest :]), parameters)
        needs = ctx.needs_input_grad[3:]
        found = backward.run(list(grads[: -ctx.counts[1]]), grads[-ctx.counts[1] :])
        wanted = [g if need else None for g, need in zip(found, needs, strict=True)]
        return None, None, None, *wanted


def _split(tensors: Sequence[Tensor], counts: tuple[int, int]) -> tuple[Tensors, Tensors, Tensors]:
    n, m = counts
    return list(tensors[:n]), list(tensors[n : n + m]), list(tensors[n + m :])


class _Backward:
    """One backward pass: gradients of inputs and parameters, summed over blocks of steps."""

    def __init__(
        self, step: StepFunction, chunk: int, inputs: Tensors, states: Tensors, parameters: Tensors
    ) -> None:
        self.step, self.chunk, self.inputs, self.states = step, chunk, inputs, states
        self.parameters = parameters
        self.totals = [torch.zeros_like(p) for p in parameters]
        self.gradients = [torch.zeros_like(x) for x in inputs]
        self.samples = states[0].shape[1]
        self.widths = [s[0, 0].numel() for s in states]

    def run(self, dys: list[Tensor | None], after: Sequence[Tensor | None]) -> list[Any]:
        """Return the gradients of inputs, initial state and parameters."""
        last = [s[-1] for s in self.states]
        seeds = [torch.zeros_like(s) if g is None else g for s, g in zip(last, after, strict=True)]
        g = _flat(seeds, self.samples)
        length = len(self.inputs[0])
        numbers = self.samples * sum(self.widths) ** 2 * g.element_size()
        block = max(self.chunk, _BLOCK_BYTES // numbers)
        for stop in range(length, 0, -block):
            g = self._add_block(max(0, stop - block), stop, dys, g)
        first = [s[0] for s in self.states]
        parts = g.split(self.widths, -1)
        state = [p.reshape(s.shape) for p, s in zip(parts, first, strict=True)]
        return [*self.gradients, *state, *self.totals]

    def _add_block(self, start: int, stop: int, dys: list[Tensor | None], g: Tensor) -> Tensor:
        """Backpropagate some steps; return the gradient of the state before them."""
        steps, samples = stop - start, (stop - start) * self.samples
        x = [_leaf(t[start:stop].flatten(0, 1)) for t in self.inputs]
        s = [_leaf(t[start:stop].flatten(0, 1)) for t in self.states]
        with torch.enable_grad():
            outputs, after = self.step(x, s)
        _check_equal(after, [kept[start + 1 : stop + 1].flatten(0, 1) for kept in self.states])
        seeds = [
            (y, dy[start:stop].reshape(y.shape))
            for y, dy in zip(outputs, dys, strict=True)
            if dy is not None and y.requires_grad
        ]
        direct = _products(seeds, s)
        losses = _flat(direct, samples).unflatten(0, (steps, self.samples))
        jacobians = self._jacobians(after, s, steps)
        gs = _scan(jacobians, losses, g, self.chunk)
        own = [
            part.reshape(t.shape)
            for part, t in zip(gs[1:].flatten(0, 1).split(self.widths, -1), after, strict=True)
        ]
        roots = [(t, part) for t, part in zip(after, own, strict=True) if t.requires_grad]
        found = _products([*roots, *seeds], [*x, *self.parameters], last=True)
        totals = [*(t[start:stop] for t in self.gradients), *self.totals]
        for total, share in zip(totals, found, strict=True):
            total += share.reshape(total.shape)
        return gs[0]

    def _jacobians(self, after: Tensors, s: Tensors, steps: int) -> Tensor:
        """Return the Jacobians; row i is the gradient by the previous state of number i."""
        rows = []
        for t in after:
            units = torch.eye(t[0].numel(), dtype=t.dtype, device=t.device)
            for unit in units.view(-1, *t.shape[1:]):  # 1 at one number of every sample
                seed = [(t, unit.expand_as(t).contiguous())] if t.requires_grad else []
                rows.append(_flat(_products(seed, s), len(t)))
        found: Tensor = torch.stack(rows, 1).unflatten(0, (steps, self.samples))
        return found


def _flat(parts: Sequence[Tensor], samples: int) -> Tensor:
    return torch.cat([p.reshape(samples, -1) for p in parts], -1)


def _check_independent(step: StepFunction, x: Tensors, state: Tensors) -> None:
    """Refuse a cell whose samples depend on one another, before any work is done."""
    others = [0.5 * t + 0.1 if t.is_floating_point() else t for t in (*x, *state)]
    both = [torch.cat([t, other]) for t, other in zip((*x, *state), others, strict=True)]
    _, after = step(x, state)
    _, together = step(both[: len(x)], both[len(x) :])
    _check_equal([t[: len(s)] for t, s in zip(together, after, strict=True)], after)


def _check_equal(found: Tensors, expected: Tensors) -> None:
    for one, other in zip(found, expected, strict=True):
        near = 1e3 * torch.finfo(other.dtype).eps
        same = one.shape == other.shape
        if not (same and torch.allclose(one, other, rtol=near, atol=near, equal_nan=True)):
            raise CellError(
                'the cell cannot be run under backward="scan": called for more samples or several '
                "steps at once, it returned different states; expected samples (the first "
                "dimension) that do not depend on one another, and no random numbers; use "
                "backward=None, or memory="
            )


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.is_floating_point())


def _products(seeds: list[tuple[Tensor, Tensor]], leaves: Tensors, last: bool = False) -> Tensors:
    """Return vector-Jacobian products; zero for a leaf that no root depends on."""
    if not seeds:
        return [torch.zeros_like(t) for t in leaves]
    wanted = [t for t in leaves if t.requires_grad]
    roots, vectors = zip(*seeds, strict=True)
    found = iter(
        torch.autograd.grad(roots, wanted, vectors, retain_graph=not last, materialize_grads=True)
    )
    return [next(found) if t.requires_grad else torch.zeros_like(t) for t in leaves]


def _scan(jacobians: Tensor, losses: Tensor, g: Tensor, chunk: int) -> Tensor:
    """Return the gradient of every state of a block, (L + 1, B, n), from the one before it."""
    length = len(jacobians)
    whole = length - length % chunk
    rest = length - whole
    chunks = jacobians[rest:].unflatten(0, (-1, chunk)) if whole else jacobians[:0]
    gs = g.new_empty(length + 1, *g.shape)
    gs[length] = g
    if whole:
        own = losses[rest:].unflatten(0, (-1, chunk))
        product, offset = chunks[:, -1], own[:, -1]
        for t in range(chunk - 2, -1, -1):
            offset = own[:, t] + _apply(offset, chunks[:, t])
            product = product @ chunks[:, t]
        rows = torch.cat([product, offset.unsqueeze(-2)], -2)
        local, before = carry(rows, g)
        if trusted(rows, local):
            gs[rest] = before
            gs[rest + chunk :: chunk] = local
            for t in range(chunk - 1, 0, -1):
                local = own[:, t] + _apply(local, chunks[:, t])
                gs[rest + t : length : chunk] = local
        else:
            rest = length
    for t in range(rest - 1, -1, -1):
        gs[t] = losses[t] + _apply(gs[t + 1], jacobians[t])
    return gs


def _apply(g: Tensor, jacobians: Tensor) -> Tensor:
    return (g.unsqueeze(-2) @ jacobians).squeeze(-2)
