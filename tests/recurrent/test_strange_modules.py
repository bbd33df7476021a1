"""``rg.RNN``, ``GRU`` and ``LSTM`` where weights are computed, and where tensors are not real."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_sequence

import retrograde as rg
from oracles.loops import assert_bitwise, assert_near

pytestmark = pytest.mark.usefixtures("ours_however_short")

DOUBLE = torch.float64
STEPS = 60
KINDS = ("LSTM", "GRU", "RNN")


def inputs(*shape, dtype=DOUBLE, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (STEPS, 3, 5), generator=generator, dtype=dtype)


class Dropped(nn.Module):
    """As in AWD-LSTM: around a network, whose weight is an attribute, computed before each call."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn, raw = rnn, rnn.weight_hh_l0
        del rnn._parameters["weight_hh_l0"]
        rnn.register_parameter("weight_hh_l0_raw", nn.Parameter(raw.detach()))
        rnn.weight_hh_l0 = raw.detach()

    def forward(self, *args):
        raw = 1.0 * self.rnn.weight_hh_l0_raw
        self.rnn.weight_hh_l0 = nn.functional.dropout(raw, 0.5, self.training)
        return self.rnn(*args)


class Arguments(nn.Module):
    """All of a network's parameters are frozen; what is trained lies outside it."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.scale = rnn, nn.Parameter(torch.ones((), dtype=DOUBLE))
        self.raw = rnn.weight_hh_l0.detach()
        rnn.requires_grad_(False)
        del rnn._parameters["weight_hh_l0"]

    def forward(self, *args):
        self.rnn.weight_hh_l0 = self.raw * self.scale
        return self.rnn(*args)


class Chained(nn.Module):
    """One weight is used itself, and another is computed from it."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn
        del rnn._parameters["weight_hh_l1"]

    def forward(self, *args):
        self.rnn.weight_hh_l1 = 0.5 * self.rnn.weight_hh_l0
        return self.rnn(*args)


def all_pruned(rnn):
    for name in [*rnn._parameters]:
        prune.random_unstructured(rnn, name, 0.5)
    return rnn


def tied(rnn):
    rnn.weight_hh_l1 = rnn.weight_hh_l0
    return rnn


#: What computes the weights of a network of two layers; each returns what is to be called.
COMPUTED = {
    "spectral": lambda rnn: parametrizations.spectral_norm(rnn, "weight_hh_l0"),
    "spectral, by a hook": lambda rnn: nn.utils.spectral_norm(rnn, "weight_hh_l0"),
    "norm": lambda rnn: parametrizations.weight_norm(rnn, "weight_hh_l0"),
    "norm, by a hook": lambda rnn: nn.utils.weight_norm(rnn, "weight_hh_l0"),
    "orthogonal": lambda rnn: parametrizations.orthogonal(rnn, "weight_ih_l0"),
    "pruned": lambda rnn: prune.l1_unstructured(rnn, "weight_hh_l0", 0.5),
    "all pruned": all_pruned,
    "dropped": Dropped,
    "given": Arguments,
    "tied": tied,
    "chained": Chained,
}
EVERY_WEIGHT = pytest.mark.parametrize("computed", COMPUTED)
WAYS = [
    {"memory": "60%"},
    {"memory": "20%"},
    {"memory": 1.0},
    {"backward": "scan"},
    {"memory": "40%", "backward": "scan"},
    {"schedule": rg.plan(STEPS, 5)},
]


def net(computed, kind="LSTM", of=nn, **options):
    """A network whose weights are computed, the same for the same arguments."""
    torch.manual_seed(0)
    rnn = getattr(of, kind)(5, 7, 2, dtype=DOUBLE, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hooks are deprecated
        return COMPUTED[computed](rnn)


def recurrent(model):
    return next(m for m in model.modules() if isinstance(m, nn.RNNBase))


def trained(model, between=lambda rnn: None):
    """Outputs, gradients and buffers of a program of several calls."""
    torch.manual_seed(1)
    x, seen = inputs().requires_grad_(), []
    for training, grad in ((True, True), (True, False), (False, True), (True, True)):
        model.train(training)
        between(recurrent(model))
        with torch.set_grad_enabled(grad):
            y, _ = model(x)
        if grad:
            y.square().sum().backward()
        seen.append(y.detach())
    between(recurrent(model))
    return [*seen, x.grad, *(p.grad for p in model.parameters())], [*model.buffers()]


@EVERY_WEIGHT
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_which_nothing_is_asked_is_torchs(computed, kind):
    (ours, state), (theirs, their_state) = (trained(net(computed, kind, of)) for of in (rg, nn))
    assert_bitwise(ours, theirs)
    assert_bitwise(state, their_state)


@EVERY_WEIGHT
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_computed_weights_get_torchs_gradient_and_are_computed_as_often(computed, way):
    kind = KINDS[(list(COMPUTED).index(computed) + WAYS.index(way)) % 2]
    ours, state = trained(net(computed, kind, rg, **way))
    theirs, their_state = trained(net(computed, kind))
    assert_near(ours, theirs, 1e-11)
    assert_bitwise(state, their_state)


@pytest.mark.quick(1)
@EVERY_WEIGHT
def test_what_is_only_measured_leaves_no_trace(computed):
    def measure(rnn):
        x = inputs().requires_grad_()
        rnn.fit(x)
        rg.fit(rnn, x, memory="70%")

    plain, plain_state = trained(net(computed, "GRU", rg, memory="70%"))
    ours, state = trained(net(computed, "GRU", rg, memory="70%"), measure)
    assert_bitwise(ours, plain)
    assert_bitwise(state, plain_state)


@pytest.mark.parametrize("computed", [*COMPUTED][:7])  # by what torch has for it
def test_a_fit_before_the_first_call_is_the_fit_of_that_call(computed):
    ours = net(computed, of=rg, memory="70%")
    found = ours.fit(inputs())
    ours(inputs())[0].sum().backward()
    assert ours.fit(inputs()) == found


@EVERY_WEIGHT
def test_a_budget_for_a_model_with_computed_weights(computed):
    model, theirs = net(computed), net(computed)
    rnn = recurrent(model)
    before = copy.deepcopy(model.state_dict()), dict(vars(rnn)), [*rnn._flat_weights]
    division = rg.budget(model, "60%", inputs())
    assert isinstance(rnn, rg.LSTM)
    assert rnn.memory == division.total_bytes
    assert_bitwise([*model.state_dict().values()], [*before[0].values()])
    assert all(vars(rnn)[name] is value for name, value in before[1].items() if name != "training")
    assert all(a is b for a, b in zip(rnn._flat_weights, before[2], strict=True))
    (ours, state), (expected, their_state) = trained(model), trained(theirs)
    assert_near(ours, expected, 1e-11)
    assert_bitwise(state, their_state)
    assert rnn.fit(inputs()).ordinary_bytes == division.ordinary_bytes  # of the trained weights


def test_measuring_computes_no_weight_and_a_call_as_often_as_torchs():
    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            Counted.calls += 1
            return 1.0 * weight

    seen = []
    for of, way in ((nn, {}), (rg, {}), (rg, {"memory": "60%"}), (rg, {"backward": "scan"})):
        rnn = of.LSTM(5, 7, dtype=DOUBLE, **way)
        parametrize.register_parametrization(rnn, "weight_hh_l0", Counted())
        Counted.calls = 0
        for _ in range(2):
            rnn(inputs())[0].sum().backward()
        seen.append(Counted.calls)
        rg.fit(rnn, inputs(), memory="70%")
        if way.get("memory"):
            rnn.fit(inputs())
        assert Counted.calls == seen[-1]
    assert len(set(seen)) == 1


def test_hooks_of_a_module_are_not_run_by_what_is_measured():
    rnn, seen = rg.GRU(5, 7, memory="60%", dtype=DOUBLE), []
    rnn.register_forward_hook(lambda *_: seen.append("forward"))
    for p in rnn.parameters():
        p.register_hook(lambda g: seen.append("parameter"))
    rnn(inputs())
    assert seen == ["forward"]
    rnn.fit(inputs())
    assert seen == ["forward"]


def test_what_a_class_of_its_own_adds_is_not_measured():
    class Normed(rg.GRU):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.norm = nn.BatchNorm1d(5, dtype=DOUBLE)

        def forward(self, x, hx=None):
            return super().forward(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]), hx)

    ours = Normed(5, 7, dtype=DOUBLE, memory="60%")
    ours(inputs())[0].sum().backward()
    assert ours.norm.num_batches_tracked == 1


EVERY_OPTION = pytest.mark.parametrize("way", [{}, *WAYS], ids=str)


def assert_nothing_was_kept(ours, x):
    """The module knows nothing yet, and goes on as one that has just been made."""
    assert not len(ours._fits)
    y, _ = ours(x)
    y.sum().backward()
    expected = torch.nn.GRU(5, 7, dtype=DOUBLE)
    expected.load_state_dict(ours.state_dict())
    expected(x)[0].sum().backward()
    assert_near([p.grad for p in ours.parameters()], [p.grad for p in expected.parameters()])


def gru(**options):
    torch.manual_seed(0)
    return rg.GRU(5, 7, dtype=DOUBLE, **options)


@pytest.mark.quick(1)
@EVERY_OPTION
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_an_export_is_torchs_and_nothing_of_it_is_kept(way, strict):
    ours = gru(**way)
    graph = torch.export.export(ours, (inputs(),), strict=strict)
    called = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert "aten.gru.input" in called
    assert_bitwise(graph.module()(inputs()), nn.GRU.forward(ours, inputs()))
    assert_nothing_was_kept(ours, inputs())


@EVERY_OPTION
def test_fake_tensors_run_torchs_own_and_nothing_of_it_is_kept(way):
    ours = gru(**way)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y, _ = ours(mode.from_tensor(inputs()))
    assert (type(y).__name__, y.shape) == ("FakeTensor", (STEPS, 3, 7))
    assert_nothing_was_kept(ours, inputs())


@pytest.mark.quick(0)
@EVERY_OPTION
def test_what_is_traced_or_functional_is_torchs_own(way):
    ours, theirs = gru(**way), nn.GRU(5, 7, dtype=DOUBLE)
    calls = (lambda x: ours(x)[0], lambda x: theirs(x)[0])
    graphs = [make_fx(call)(inputs()).graph for call in calls]
    assert len({len(graph.nodes) for graph in graphs}) == 1
    y = torch.func.functionalize(lambda x: ours(x)[0])(inputs())
    assert torch.equal(y, nn.GRU.forward(ours, inputs())[0])
    assert_nothing_was_kept(ours, inputs())


@EVERY_OPTION
def test_on_the_meta_device_it_is_torchs(way):
    ours = gru(**way, device="meta")
    y, last = ours(inputs().to("meta"))
    y.sum().backward()
    assert (y.device.type, y.shape, last.shape) == ("meta", (STEPS, 3, 7), (1, 3, 7))
    assert ours.weight_hh_l0.grad.shape == ours.weight_hh_l0.shape
    assert not len(ours._fits)


def test_what_has_no_bytes_is_not_measured():
    x = inputs().to("meta")
    for ask in (
        lambda: gru(memory="60%", device="meta").fit(x),
        lambda: rg.fit(nn.GRU(5, 7, device="meta", dtype=DOUBLE), x, memory="60%"),
        lambda: rg.budget(nn.GRU(5, 7, device="meta", dtype=DOUBLE), "60%", x),
    ):
        with pytest.raises(
            rg.CellError, match=r"meta device.*: expected .*real .*bytes|real .*take"
        ):
            ask()
    ours = gru(memory="60%")
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(rg.CellError, match="fake or on"),
    ):
        ours.fit(inputs())
    assert ours.fit(inputs()).budget_bytes > 24


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_is_compiled_with_nothing_asked_is_traced_as_torchs_own():
    found = []
    for of in (rg, nn):
        torch.compiler.reset()
        torch.manual_seed(0)
        rnn, graphs = of.GRU(5, 7, dtype=DOUBLE), []

        def backend(graph, _, graphs=graphs):
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op[:4] == "call"])
            return graph.forward

        with dynamo.patch(allow_rnn=True):
            y = torch.compile(rnn, backend=backend, fullgraph=True)(inputs())[0]
        assert torch.equal(y, rnn(inputs())[0])
        found.append(graphs)
    assert found[0] == found[1]


TRACED = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Around(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.rnn(x)
        return y


@TRACED
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_which_nothing_is_asked_is_traced_but_not_scripted(kind):
    ours = getattr(rg, kind)(5, 7, dtype=DOUBLE)
    expected = ours(inputs())[0]
    traced = torch.jit.trace(Around(ours), inputs())
    assert torch.equal(traced(inputs()), expected)
    traced(inputs()).sum().backward()
    assert ours.weight_hh_l0.grad is not None  # the parameters are shared
    for asked in (ours, Around(ours), parametrizations.weight_norm(ours, "weight_hh_l0")):
        with pytest.raises(rg.CellError, match="TorchScript cannot run this"):
            torch.jit.script(asked)


def given(way):
    return " and ".join(f"{name}=" for name in ("memory", "schedule", "backward") if name in way)


@TRACED
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_asked_is_not_traced(way):
    ours = gru(**way)
    message = rf"torch\.jit\.trace .*with {given(way)}: .*no_grad\(\), or without {given(way)}"
    with pytest.raises(rg.RetrogradeError, match=message):
        torch.jit.trace(Around(ours), inputs())
    with torch.no_grad():
        traced = torch.jit.trace(Around(ours), inputs())
    assert torch.equal(traced(inputs()), nn.GRU.forward(ours, inputs())[0])


@EVERY_OPTION
def test_a_state_may_be_a_list(way):
    found, h, c = [], inputs(1, 3, 7, seed=1), inputs(1, 3, 7, seed=2)
    for kind in (list, tuple):
        torch.manual_seed(0)
        lstm = rg.LSTM(5, 7, dtype=DOUBLE, **way)
        state = kind([h.requires_grad_(), c.requires_grad_()])
        if "memory" in way:
            lstm.fit(inputs(), state)
        y, (last, _) = lstm(inputs(), state)
        found.append(torch.autograd.grad(y.sum() + last.sum(), [h, c, *lstm.parameters()]))
    assert_bitwise(*found)


def test_what_has_nothing_to_backpropagate_is_not_measured():
    frozen = gru(memory="60%").requires_grad_(False)
    for ask in (frozen.fit, lambda x: rg.fit(frozen, x, memory="60%")):
        with pytest.raises(rg.CellError, match="nothing to backpropagate: expected a weight or an"):
            ask(inputs())
        assert ask(inputs().requires_grad_())


def test_a_fit_for_what_is_no_state_says_what_is():
    with pytest.raises(rg.CellError, match=r"state is a Tensor: expected the pair \(h, c\)"):
        rg.LSTM(5, 7, memory=1.0).fit(inputs(), inputs(1, 3, 7))
    with pytest.raises(rg.CellError, match="state is a tuple: expected a tensor"):
        rg.GRU(5, 7, memory=1.0).fit(inputs(), (inputs(1, 3, 7),))


BATCHED = pytest.mark.parametrize("way", [way for way in WAYS if way != {"memory": 1.0}], ids=str)


@BATCHED
def test_a_batch_of_gradients_is_refused(way):
    ours, x = gru(**way), inputs().requires_grad_()
    y, _ = ours(x)
    seeds = inputs(3, *y.shape)
    calls = (
        lambda: torch.autograd.grad(y, x, seeds, is_grads_batched=True, retain_graph=True),
        lambda: torch.autograd.functional.jacobian(lambda x: ours(x)[1], x, vectorize=True),
        lambda: torch.func.vmap(lambda s: torch.autograd.grad(y, x, s, retain_graph=True))(seeds),
    )
    for call in calls:
        with pytest.raises(rg.RetrogradeError, match=r"got a batch of gradients.*for each of them"):
            call()
    (one,) = torch.autograd.grad(y, x, seeds[0])  # nothing is spoilt
    (expected,) = torch.autograd.grad(nn.GRU.forward(ours, x)[0], x, seeds[0])
    assert_near([one], [expected])


def test_batches_go_through_where_nothing_is_asked():
    ours, x = gru(), inputs().requires_grad_()
    y, _ = ours(x)
    seeds = inputs(3, *y.shape)
    (found,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, s, retain_graph=True)[0] for s in seeds]
    assert_near([found], [torch.stack(each)])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_transforms_name_the_option_that_was_given(way):
    ours = gru(**way)
    remedy = " and ".join(f"{name[:-1]}=None" for name in given(way).split(" and "))
    with pytest.raises(rg.RetrogradeError, match=rf"with {given(way)}: .* use {remedy} \("):
        torch.func.grad(lambda x: ours(x)[0].sum())(inputs())


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_names_may_be_made_ours(kind, monkeypatch):
    torchs, ours = getattr(nn, kind), getattr(rg, kind)
    x = inputs()
    expected = ours(5, 7, dtype=DOUBLE, memory="70%").fit(x)
    monkeypatch.setattr(torch.nn, kind, ours)
    made = getattr(torch.nn, kind)(5, 7, dtype=DOUBLE, memory="70%")
    made(x)[0].sum().backward()
    assert made.fit(x) == expected
    for model in (torchs(5, 7, dtype=DOUBLE), ours(5, 7, dtype=DOUBLE)):
        found = rg.fit(model, x, memory="70%")
        assert found.ordinary_bytes == expected.ordinary_bytes
        assert rg.budget(model, "70%", x).ordinary_bytes == expected.ordinary_bytes
        assert type(model) is ours


WRONG_INPUTS = {
    "no dimension": torch.zeros(()),
    "one dimension": torch.zeros(5),
    "four dimensions": torch.zeros(1, 9, 3, 5),
    "no steps": torch.zeros(0, 3, 5),
    "no steps, no batch": torch.zeros(0, 5),
    "another width": torch.zeros(9, 3, 4),
    "another precision": torch.zeros(9, 3, 5, dtype=DOUBLE),
    "integers": torch.zeros(9, 3, 5, dtype=torch.int64),
    "complex": torch.zeros(9, 3, 5, dtype=torch.complex64),
    "another device": torch.zeros(9, 3, 5, device="meta"),
    "None": None,
    "a list": [torch.zeros(9, 3, 5)],
    "an array": torch.zeros(9, 3, 5).numpy(),
}
PARTS = {
    "no dimension": torch.zeros(()),
    "no batch": torch.zeros(1, 7),
    "four dimensions": torch.zeros(1, 1, 3, 7),
    "another batch": torch.zeros(1, 4, 7),
    "another depth": torch.zeros(2, 3, 7),
    "another width": torch.zeros(1, 3, 6),
    "another precision": torch.zeros(1, 3, 7, dtype=DOUBLE),
    "integers": torch.zeros(1, 3, 7, dtype=torch.int64),
    "another device": torch.zeros(1, 3, 7, device="meta"),
}
RIGHT = torch.zeros(1, 3, 7)
WRONG_STATES = {
    "alone": (RIGHT,),
    "a list alone": [RIGHT],
    "three": (RIGHT,) * 3,
    "none": (),
    "a string": "h",
    "numbers": (1.0, 2.0),
    "a number": 1.0,
    "a dict": {"h": RIGHT},
}


def raised(call):
    with pytest.raises(Exception) as said:  # noqa: PT011
        call()
    return said.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way", [{"memory": "70%"}, {"backward": "scan"}, {"schedule": rg.plan(9, 3)}], ids=str
)
def test_what_torch_refuses_is_refused_with_torchs_kind_of_error(kind, way):
    theirs, ours = getattr(nn, kind)(5, 7), getattr(rg, kind)(5, 7, **way)
    states = dict(WRONG_STATES)
    for name, part in PARTS.items():
        states |= {name: (part, part), f"{name}, c": (RIGHT, part)} if kind == "LSTM" else {}
        states |= {} if kind == "LSTM" else {name: part, f"{name} in a pair": (part, part)}
    calls = [(x,) for x in WRONG_INPUTS.values()]
    calls += [(torch.zeros(9, 3, 5), state) for state in states.values()]
    if kind != "LSTM":  # torch's own looks at no packed state of an LSTM, and reads past its end
        packed = pack_sequence([torch.zeros(9, 5)] * 3)
        calls += [(packed, state) for state in states.values()]
    for arguments in calls:
        expected, found = (raised(lambda m=m, a=arguments: m(*a)) for m in (theirs, ours))
        assert isinstance(found, type(expected)), (arguments, expected, found)


def test_an_input_that_torch_refuses_is_every_kind_of_error():
    with pytest.raises(rg.CellError, match="has 4 dimensions") as said:
        rg.GRU(5, 7, memory=1.0)(torch.zeros(1, 9, 3, 5))
    assert isinstance(said.value, TypeError | ValueError)
    assert isinstance(said.value, RuntimeError)
    with pytest.raises(ValueError, match=r"initial state is \(1, 7\): expected 3 dimensions, as"):
        rg.GRU(5, 7, memory=1.0)(torch.zeros(9, 3, 5), torch.zeros(1, 7))
