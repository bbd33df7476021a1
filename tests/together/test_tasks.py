"""Six things that people come for, each in at most 25 lines of what the pages show."""

import inspect

import pytest
import torch
from torch import nn

import retrograde as rg


def gru_all_in_forty_mib():
    """A GRU over 5,000 steps, in 40 MiB in all: inputs, outputs, gradients (streaming.md)."""
    gru, head = rg.GRU(64, 64), nn.Linear(64, 1)

    def loss(steps, y):
        return head(y).square().sum() / 5000

    def iteration():
        x = torch.randn(5000, 16, 64)
        rg.bptt(gru, x, loss=loss, memory="8MiB")

    iteration()
    assert rg.measure(iteration).peak_bytes < 40 * 2**20
    return [gru, head]


def trainer_of_hugging_face():
    """A model of Hugging Face in its own Trainer (whole_model.md)."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 6, "n_head": 2, "n_embd": 32, "vocab_size": 50, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    data = [{"input_ids": (ids := torch.randint(50, (64,))), "labels": ids} for _ in range(8)]
    batch = {key: torch.stack([row[key] for row in data[:4]]) for key in data[0]}
    rg.budget(model, "40%", sample=batch)
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": "none"}
    arguments = transformers.TrainingArguments("build", use_cpu=True, **options)
    before = model.transformer.h[0].attn.c_attn.weight.clone()
    transformers.Trainer(model, arguments, train_dataset=data).train()
    assert not torch.equal(before, model.transformer.h[0].attn.c_attn.weight)
    return []


def simulator_without_inputs():
    """A simulator whose steps have no inputs (cells.md)."""
    rate, start = torch.tensor([0.1, 0.2], requires_grad=True), torch.ones(64, 2)

    def step(t, height):
        height = height + 0.01 * (rate * height).sin()
        return height.mean(), height

    seen, last = rg.unroll(step, torch.arange(2000), start, memory="64KiB")
    (seen.sum() + last.sum()).backward()
    assert rate.grad.all()
    return []


def how_much_slower():
    """What a budget costs, beside torch's own time for the same call (troubleshooting.md)."""
    found = rg.fit(nn.LSTM(64, 128), (1000, 8, 64), memory="10%")
    print(found)  # …: 0.07 s an iteration, 0.5 times the ordinary one's
    assert found.seconds > 0 < found.ordinary_seconds
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(9))
    )
    division = rg.budget(model, "70%", torch.randn(64, 64, 64))
    print(division)
    assert division.seconds > division.ordinary_seconds > 0
    return [model]


def spiking_neurons_as_in_tutorials():
    """Neurons that are handed their potentials, and count in themselves (cells.md)."""

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, current, mem):
            self.count = self.count + 1
            mem = 0.9 * mem + current
            return torch.sigmoid(9 * (mem - 1)), mem

    linear, lif = nn.Linear(8, 8), Leaky()

    def step(x_t, mem):
        return lif(linear(x_t), mem)

    spikes, _ = rg.unroll(
        step, torch.rand(500, 4, 8), torch.zeros(4, 8), memory="15%", stateful=[lif]
    )
    spikes.sum().backward()
    return [linear]


def save_and_load():
    """Weights go to torch's own module and back (migration.md)."""
    ours, theirs, x = rg.LSTM(8, 8, memory="40%"), nn.LSTM(8, 8), torch.randn(90, 2, 8)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-4, atol=1e-6)
    ours.load_state_dict(theirs.state_dict())
    ours(x)[0].sum().backward()
    return [ours]


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    "task",
    [
        gru_all_in_forty_mib, trainer_of_hugging_face, simulator_without_inputs, how_much_slower,
        spiking_neurons_as_in_tutorials, save_and_load,
    ],
)  # fmt: skip
def test_a_task_is_done_in_few_lines(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(inspect.getsource(task).splitlines()) <= 25
    modules = task()
    for module in modules:
        trained = [p for p in module.parameters() if p.grad is not None]
        assert len(trained) == len([*module.parameters()]) or task is how_much_slower
