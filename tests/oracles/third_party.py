"""Cells that nobody here wrote, each in the library that has it: snnTorch, spikingjelly, Norse,
ncps, torchdiffeq, mambapy, minGRU-pytorch and dnc. A case skips where its library is absent."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CASES", "Case", "build"]

SIZE, INPUTS = 32, 8


@dataclass
class Case:
    """A step over inputs (T, B, INPUTS), as one would write it for a plain loop."""

    step: Callable[..., Any]
    module: nn.Module
    state: Any = None
    stateful: list[nn.Module] = field(default_factory=list)
    reset: Callable[[], object] = lambda: None

    def plain(self, x: Tensor) -> Tensor:
        """Ordinary backpropagation through time."""
        self.reset()
        outputs, state = [], self.state
        for x_t in x:
            if self.stateful:
                outputs.append(self.step(x_t))
            else:
                y, state = self.step(x_t, state)
                outputs.append(y)
        return torch.stack(outputs)

    def ours(self, x: Tensor, **asked: Any) -> Tensor:
        """The same by ``rg.unroll``."""
        import retrograde as rg

        self.reset()
        return rg.unroll(self.step, x, self.state, stateful=self.stateful, **asked)[0]


def snntorch(name: str, **options: Any) -> Callable[[int], Case]:
    def make(batch: int) -> Case:
        snn, utils = import_module("snntorch"), import_module("snntorch.utils")
        net = nn.Sequential(
            nn.Linear(INPUTS, SIZE), getattr(snn, name)(init_hidden=True, **options)
        )
        return Case(net, net, stateful=[net], reset=lambda: utils.reset(net))

    return make


def spikingjelly(batch: int) -> Case:
    neuron = import_module("spikingjelly.activation_based.neuron")
    functional = import_module("spikingjelly.activation_based.functional")
    layers = (
        nn.Linear(INPUTS, SIZE),
        neuron.LIFNode(),
        nn.Linear(SIZE, SIZE),
        neuron.ParametricLIFNode(),
    )
    net = nn.Sequential(*layers)
    return Case(net, net, stateful=[net], reset=lambda: functional.reset_net(net))


def norse_network(batch: int) -> Case:
    norse = import_module("norse.torch")
    net = norse.SequentialState(
        nn.Linear(INPUTS, SIZE), norse.LIFCell(), nn.Linear(SIZE, SIZE),
        norse.LIFRecurrentCell(SIZE, SIZE), norse.LICell(),
    )  # fmt: skip
    return Case(net, net)


def norse_lsnn(batch: int) -> Case:
    net = import_module("norse.torch").LSNNRecurrentCell(INPUTS, SIZE)
    return Case(net, net)


def ltc(batch: int) -> Case:
    ncps, wirings = import_module("ncps.torch"), import_module("ncps.wirings")
    wiring = wirings.AutoNCP(SIZE, 4)
    wiring.build(INPUTS)
    net = ncps.LTCCell(wiring)
    return Case(net, net, torch.zeros(batch, SIZE))


def cfc(batch: int) -> Case:
    net = import_module("ncps.torch").CfCCell(INPUTS, SIZE)
    return Case(lambda x, h: net(x, h, 1.0), net, torch.zeros(batch, SIZE))


def neural_ode(batch: int) -> Case:
    odeint = import_module("torchdiffeq").odeint
    net, drive = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)), None
    drive = nn.Linear(INPUTS, SIZE)
    times = torch.tensor([0.0, 0.1])

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        force = drive(x)
        y = odeint(lambda t, y: net(y) + force, y, times, method="rk4")[-1]
        return y, y

    return Case(step, nn.ModuleList([net, drive]), torch.zeros(batch, SIZE))


def mamba(batch: int) -> Case:
    module = import_module("mambapy.mamba")
    config = module.MambaConfig(d_model=INPUTS, n_layers=1, d_state=4)
    block = module.MambaBlock(config)
    state = (
        torch.zeros(batch, config.d_inner, config.d_state),
        torch.zeros(batch, config.d_inner, 3),
    )
    return Case(block.step, block, state)


def min_gru(batch: int) -> Case:
    net = import_module("minGRU_pytorch.minGRU").minGRU(INPUTS)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y, h = net(x.unsqueeze(1), h, return_next_prev_hidden=True)
        return y.squeeze(1), h

    return Case(step, net, torch.full((batch, 1, INPUTS), 0.1))


def dnc(batch: int) -> Case:
    net = import_module("dnc").DNC(
        INPUTS, SIZE, num_layers=1, num_hidden_layers=1, nr_cells=6, cell_size=5
    )

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = net(x.unsqueeze(1), state or (None, None, None), reset_experience=state is None)
        return y.squeeze(1), state

    return Case(step, net)


CASES: dict[str, Callable[[int], Case]] = {
    "snnTorch Leaky": snntorch("Leaky", beta=0.9, learn_beta=True),
    "snnTorch Synaptic": snntorch("Synaptic", alpha=0.8, beta=0.9),
    "snnTorch Alpha": snntorch("Alpha", alpha=0.9, beta=0.8),
    "snnTorch Lapicque": snntorch("Lapicque", beta=0.9),
    "snnTorch RLeaky": snntorch("RLeaky", beta=0.9, linear_features=SIZE),
    "spikingjelly LIF network": spikingjelly,
    "Norse LIF network": norse_network,
    "Norse LSNN": norse_lsnn,
    "ncps LTC": ltc,
    "ncps CfC": cfc,
    "torchdiffeq rollout": neural_ode,
    "mambapy block": mamba,
    "minGRU": min_gru,
    "DNC": dnc,
}


def build(name: str, batch: int, seed: int = 0) -> Case | None:
    """A case with its weights drawn from a seed; None where its library is absent."""
    torch.manual_seed(seed)
    try:
        return CASES[name](batch)
    except ImportError:
        return None
