"""Time across ranks beside data across ranks; saved by some ranks, and read by others."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg
from oracles.processes import join, spawn

SIZE = 4

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo"),
]


class Model(nn.Module):
    """A recurrent module and a linear one, which has no more to do with ranks than any other."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


def make():
    torch.manual_seed(0)
    return rg.GRU(3, 4, 2, dtype=torch.float64)


def data():
    torch.manual_seed(1)
    return torch.randn(10, 6, 3, dtype=torch.float64)


def train(net, x, optimizer, share=1.0):
    for _ in range(3):
        optimizer.zero_grad()
        (net(x).square().sum() * share).backward()
        optimizer.step()


def a_rank(rank, folder):
    join(rank, SIZE, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "time"))
    of_samples, of_steps = mesh.get_local_rank("data"), mesh.get_local_rank("time")
    sharded = rg.TimeSharded(make(), mesh["time"].get_group(), way="tree")
    net = DistributedDataParallel(Model(sharded), process_group=mesh["data"].get_group())
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    mine = data().tensor_split(2, dim=1)[of_samples].tensor_split(2)[of_steps]
    train(net, mine, optimizer, share=2.0)  # which data parallelism halves
    state = {"net": sharded.rnn.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(state, checkpoint_id=f"{folder}/saved")
    torch.save(list(sharded.rnn.parameters()), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.quick(0)
def test_data_times_time_and_a_state_that_another_number_of_ranks_goes_on_from(tmp_path):
    spawn(a_rank, (str(tmp_path),), nprocs=SIZE)
    alone = make()
    optimizer = torch.optim.Adam(alone.parameters(), 0.05)
    train(lambda x: alone(x)[0], data(), optimizer)
    for rank in range(SIZE):
        for a, b in zip(torch.load(tmp_path / f"{rank}.pt"), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    other = rg.GRU(3, 4, 2, dtype=torch.float64)
    state = {"net": other.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.load(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    other.load_state_dict(state["net"])
    for a, b in zip(other.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    moments = state["optimizer"]["state"][0]
    torch.testing.assert_close(moments["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
