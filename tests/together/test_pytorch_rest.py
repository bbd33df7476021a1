"""The rest of PyTorch: what surrounds a budgeted recurrence finds what it would find of a loop."""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.nn.utils import parametrizations

import retrograde as rg
from oracles.loops import WAYS, Looped, assert_bitwise, assert_near, both, loop, results

DOUBLE = torch.float64
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
BUDGETED = [way for way in WAYS if "memory" in WAYS[way][2]]
EVERY_BUDGET = pytest.mark.parametrize("way", BUDGETED)


def inputs(*shape, dtype=DOUBLE, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (65, 3, 5), generator=generator, dtype=dtype)


def state_for(net, batch=3):
    """A state that wants its gradient, as the network takes it."""
    shape = (batch, 7) if isinstance(net, Looped) else (1, batch, 7)
    state = tuple(inputs(*shape, seed=n).requires_grad_() for n in (1, 2))
    return state if isinstance(net, nn.LSTM) else state[0]


def test_a_state_of_ours_is_what_each_way_wants():
    for way in WAYS:
        theirs, ours = both(way)
        x = inputs().requires_grad_()
        assert_near(results(ours, x, state_for(ours)), results(theirs, x, state_for(theirs)), 1e-10)


@EVERY_BUDGET
def test_hooks_of_parameters_run_once_with_the_whole_gradient(way):
    x, found = inputs(), []
    for net in both(way):
        seen = {}
        for name, p in net.named_parameters():
            p.register_hook(
                lambda g, k=("before", name), seen=seen: seen.setdefault(k, []).append(g)
            )
            p.register_post_accumulate_grad_hook(
                lambda p, k=("after", name), seen=seen: seen.setdefault(k, []).append(p.grad)
            )
        net(x)[0].square().sum().backward()
        assert {len(calls) for calls in seen.values()} == {1}
        found.append([seen[k][0] for k in sorted(seen)])
    assert_near(*found)


@EVERY_BUDGET
def test_hooks_of_inputs_states_and_outputs_may_change_gradients(way):
    found = []
    for net in both(way):
        x, state = inputs().requires_grad_(), state_for(net)
        leaves = [x, *(state if isinstance(state, tuple) else (state,))]
        between = [t * 1.0 for t in leaves]
        for t in between:
            t.register_hook(lambda g: 2 * g)
        given = tuple(between[1:]) if isinstance(state, tuple) else between[1]
        y, _ = net(between[0], given)
        y.register_hook(lambda g: g.clamp(-0.1, 0.1))
        found.append(torch.autograd.grad(y.square().sum(), [*leaves, *net.parameters()]))
    assert_near(*found)


def test_retain_grad_of_a_captured_tensor_holds_its_whole_gradient():
    base, x, h = inputs(5).requires_grad_(), inputs(9, 2, 5), inputs(2, 5)
    found = []
    for run in (loop, lambda *a: rg.unroll(*a, schedule=rg.plan(9, 2))):
        captured = base * 2.0
        captured.retain_grad()
        y, _ = run(lambda x, h, c=captured: (torch.tanh(x * c + h),) * 2, x, h)
        y.sum().backward(retain_graph=True)
        once = captured.grad.clone()
        y.sum().backward()
        found.append([once, captured.grad])
    assert_near(*found)


@EVERY_BUDGET
def test_gradients_add_up_over_calls(way):
    found = []
    for net in both(way):
        for seed in (4, 5):
            net(inputs(seed=seed))[0].square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    assert_near(*found)


@EVERY_BUDGET
def test_a_retained_graph_is_gone_through_twice_and_then_once_more(way):
    theirs, ours = both(way)
    x = inputs().requires_grad_()
    wanted = [x, *ours.parameters()]
    (y, _), (expected, _) = ours(x), theirs(x)
    times = [torch.autograd.grad(y[5:].sum(), wanted, retain_graph=True) for _ in range(2)]
    times.append(torch.autograd.grad(y[5:].sum(), wanted))
    expected = torch.autograd.grad(expected[5:].sum(), [x, *theirs.parameters()])
    for found in times:
        assert_bitwise(found, times[0])
        assert_near(found, expected)


@EVERY_BUDGET
@pytest.mark.parametrize("loss_of", ["outputs", "one output", "final state", "part of it"])
def test_gradients_that_arrive_for_a_part_only(way, loss_of):
    found = []
    for net in both(way):
        x, state = inputs().requires_grad_(), state_for(net)
        y, final = net(x, state)
        last = final[-1] if isinstance(final, tuple) else final
        loss = {
            "outputs": y,
            "one output": y[17],
            "final state": torch.cat(final) if isinstance(final, tuple) else final,
            "part of it": last[..., :2],
        }[loss_of].square()
        leaves = [x, *(state if isinstance(state, tuple) else (state,))]
        found.append(torch.autograd.grad(loss.sum(), [*leaves, *net.parameters()]))
    assert_near(*found)


LAYOUTS = {
    "transposed": lambda: inputs(3, 65, 5).transpose(0, 1),
    "strided": lambda: inputs(130, 3, 10)[::2, :, ::2],
    "one step for all": lambda: inputs(1, 3, 5).expand(65, 3, 5),
    "one sample for all": lambda: inputs(65, 1, 5).expand(65, 3, 5),
    "windows": lambda: inputs(69, 3).unfold(0, 5, 1),
}


@EVERY_BUDGET
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_that_are_expanded_or_not_contiguous(way, layout):
    found = []
    for net in both(way):
        base = LAYOUTS[layout]()
        found.append(results(net, base.requires_grad_()))
    assert_near(*found)


def forbid(monkeypatch):
    for name in ("cells.unroll.fit_measured", "recurrent.find_plan.fit_measured"):
        monkeypatch.setattr(f"retrograde.{name}", None)
    monkeypatch.setattr("retrograde.cells.unroll.examine", None)


@EVERY_BUDGET
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_planned_and_nothing_kept(way, mode, monkeypatch):
    theirs, ours = both(way)
    forbid(monkeypatch)
    with mode():
        x = inputs()
        measured = rg.measure(lambda: ours(x))
        y, final = measured.value
        expected, _ = theirs(x)
    assert_near([y], [expected], 0)
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)
    parts = final if isinstance(final, tuple) else (final,)
    assert measured.retained_bytes == y.nbytes + sum(t.nbytes for t in parts)


def test_without_gradients_a_cell_is_called_once_a_step():
    calls = []

    def cell(x, h):
        calls.append(1)
        h.add_(x)  # nothing is run again, so this is nobody's business
        return h.clone(), h

    with torch.no_grad():
        y, _ = rg.unroll(cell, torch.ones(9, 2), torch.zeros(2), memory=1)
    assert len(calls) == 9
    assert y[:, 0].tolist() == list(range(1, 10))


def test_tensors_of_inference_mode_are_refused_where_a_gradient_is_wanted():
    with torch.inference_mode():
        x = inputs(9, 2, 5)
    with pytest.raises(rg.CellError, match=r"made in inference mode: .* clone\(\) them"):
        rg.unroll(Looped(5, 5).step, x, inputs(2, 5), memory=1)


SAVED = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": lambda net: through_file(net, weights_only=False),
}


def through_file(value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@EVERY_WAY
@pytest.mark.parametrize("by", SAVED)
def test_a_network_that_has_run_is_copied_and_saved(way, by):
    theirs, ours = both(way)
    x = inputs().requires_grad_()
    expected = results(ours, x)
    again = SAVED[by](ours)
    assert type(again) is type(ours)
    assert_bitwise(results(again, x), expected)
    with torch.no_grad():
        next(ours.parameters()).zero_()
    assert_bitwise(results(again, x), expected)
    theirs.load_state_dict(through_file(again.state_dict(), weights_only=True))
    assert_near(results(theirs, x), expected)


def test_a_schedule_is_saved_with_its_network():
    _, ours = both("LSTM")
    ours.memory, ours.schedule = None, rg.plan(65, 9)
    x = inputs().requires_grad_()
    for copied in (save(ours) for save in SAVED.values()):
        assert copied.schedule == ours.schedule
        assert_bitwise(results(copied, x), results(ours, x))


def remedy(way):
    """What a refusal says to leave out: the very options that were given."""
    given = [name for name in ("memory", "backward") if name in WAYS[way][2]]
    return "use " + " and ".join(f"{name}=None" for name in given) + r" \("


@EVERY_WAY
def test_forward_mode_is_refused(way):
    _, ours = both(way)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(inputs(), inputs(seed=5))
        with pytest.raises(rg.RetrogradeError, match=rf"forward-mode .* {remedy(way)}"):
            ours(x)


@EVERY_WAY
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transforms_of_functions_are_refused(way, transform):
    _, ours = both(way)
    calls = {
        "grad": lambda f: torch.func.grad(f)(inputs()),
        "jvp": lambda f: torch.func.jvp(f, (inputs(),), (inputs(),)),
        "vmap": lambda f: torch.func.vmap(f)(inputs(2, 65, 3, 5)),
    }
    with pytest.raises(rg.RetrogradeError, match=rf"torch\.func.* {remedy(way)}"):
        calls[transform](lambda x: ours(x)[0].sum())


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "forward_ad", "without grad"])
def test_transforms_go_through_an_ordinary_unroll(transform):
    _, ours = both("unroll")
    h = torch.zeros(3, 7, dtype=DOUBLE)

    def forward_mode(f, grad):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(inputs(), inputs(seed=5))))

    calls = {
        "grad": lambda f: [torch.func.grad(f)(inputs())],
        "jvp": lambda f: torch.func.jvp(f, (inputs(),), (inputs(seed=5),)),
        "vmap": lambda f: [torch.func.vmap(f)(inputs(2, 65, 3, 5))],
        "forward_ad": lambda f: forward_mode(f, True),
        "without grad": lambda f: forward_mode(f, False),
    }
    memory = 1 if transform == "without grad" else None
    found = calls[transform](lambda x: rg.unroll(ours.step, x, h, memory=memory)[0].sum())
    expected = calls[transform](lambda x: loop(ours.step, x, h)[0].sum())
    assert all(t is not None for t in found)
    assert_near(list(found), list(expected), 0)


@EVERY_WAY
def test_parameters_are_those_that_functional_call_puts_in_place(way):
    found = []
    for net in both(way):
        net.requires_grad_(False)
        base = {name: inputs(*p.shape, seed=9) for name, p in net.named_parameters()}
        leaves = [t.requires_grad_() for t in base.values()]
        given = {name: 0.5 * t for name, t in base.items()}
        x = inputs().requires_grad_()
        y, _ = torch.func.functional_call(net, given, (x,))
        found.append(torch.autograd.grad(y.square().sum(), [x, *leaves]))
        assert all(p.is_leaf for p in net.parameters())
    assert_near(*found)


@EVERY_WAY
def test_parametrized_weights_train(way):
    found = []
    for net in both(way):
        owner = net.cell if isinstance(net, Looped) else net
        name = next(name for name, _ in owner.named_parameters() if name.startswith("weight_hh"))
        parametrizations.weight_norm(owner, name)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs())[0].square().sum().backward()
            optimizer.step()
        found.append([p.detach() for p in net.parameters()])
    assert_near(*found)


@pytest.mark.parametrize("way", ["unroll", "LSTM"])
def test_a_parameter_changed_before_the_backward_pass_is_noticed(way):
    _, ours = both(way)
    loss = ours(inputs())[0].sum()
    with torch.no_grad():
        next(ours.parameters()).add_(1)
    with pytest.raises(rg.RetrogradeError, match=r"parameter .* modified by an inplace operation"):
        loss.backward()


def test_parameters_that_the_cell_does_not_use_may_change():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.ours, self.other = nn.GRUCell(5, 7), nn.Linear(3, 3)

        def step(self, x, h):
            h = self.ours(x, h)
            return h, h

    pair = Pair()
    y, _ = rg.unroll(pair.step, inputs(9, 2, 5).float(), torch.zeros(2, 7), schedule=rg.plan(9, 2))
    with torch.no_grad():
        pair.other.weight.add_(1)
    y.sum().backward()
    assert pair.other.weight.grad is None


@EVERY_BUDGET
def test_a_backward_pass_on_another_thread(way):
    theirs, ours = both(way)
    for net in (theirs, ours):
        loss = net(inputs())[0].square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_near([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_a_captured_tensor_on_another_thread():
    """Each thread of autograd's counts the nodes of its own graphs."""
    base, x, h = inputs(5).requires_grad_(), inputs(9, 2, 5), inputs(2, 5)
    captured = base
    for _ in range(9):
        captured = captured * 1.1

    def cell(x, h):
        h = torch.tanh(x * captured + h)
        return h, h

    expected = torch.autograd.grad(loop(cell, x, h)[0].sum(), base, retain_graph=True)
    y, _ = rg.unroll(cell, x, h, schedule=rg.plan(9, 2))
    found = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y.sum(), base)))
    thread.start()
    thread.join()
    assert_near(found, expected)
