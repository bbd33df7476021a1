"""Programs with something hidden, trained in every way beside the same without this library.

verdict, said = run("a counter in a closure", "budget", "45%")
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import retrograde as rg
from oracles.hidden_programs import CELL, CHAIN, PROGRAMS, Habit, World
from oracles.judged import place_of, seeded

__all__ = ["VERDICTS", "program", "run"]

LAYERS, WIDTH, BATCH = 5, 32, 64
STEPS, LENGTH, FEW = 3, 16, 8  # of training; of a cell, and its samples
MEMORIES = {"lean": (None,), "budget": ("least", "45%")}
HIDDEN = "what is hidden"
#: From the worst to the best; a program is as good as the worst of its budgets.
VERDICTS = (
    *("WRONG", "raw error", "least refused", "error in the pass", "refused"),
    *("exact, effects repeated", "exact"),
)


class Chain(nn.Module):
    """Layers in a loop, as the program calls them."""

    def __init__(self, world: World, layers: list[Habit]) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers), world.call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class Cell(nn.Module):
    """A leaky sum of what a layer computes; unrepeatable ones do not see the state."""

    def __init__(self, world: World, layer: Habit) -> None:
        super().__init__()
        self.layer, self.call, self.blind = layer, world.call, world.unrepeatable

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * h + 0.3 * self.call(self.layer, x if self.blind else x + 0.1 * h)
        return h, h


def looped(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    outputs = []
    for t in range(len(x)):
        y, h = cell(x[t], h)
        outputs.append(y)
    return torch.stack(outputs)


class Trial:
    """One program, run in one way within a budget, or as it is (memory None)."""

    def __init__(self, name: str, way: str, memory: Any, ours: bool) -> None:
        seeded(0)
        self.way, self.memory, self.ours = way, memory, ours
        self.world = world = World(WIDTH)
        function = PROGRAMS[name](world)
        layers = [Habit(world, function) for _ in range(LAYERS if way in CHAIN else 1)]
        shape = (BATCH, WIDTH) if way in CHAIN else (LENGTH, FEW, WIDTH)
        self.x, self.v = (torch.randn(shape, dtype=world.dtype) for _ in range(2))
        self.model = Chain(world, layers) if way in CHAIN else Cell(world, layers[0])
        if way == "Sequential":
            ours_too = rg.Sequential(*layers, memory=memory) if ours else nn.Sequential(*layers)
            self.model = ours_too
        if way == "Recurrent" and ours:
            self.model = rg.Recurrent(self.model, memory=memory)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def begin(self) -> None:
        if self.ours and self.way == "budget":
            with self.world.casts():
                rg.budget(self.model, self.memory, self.x)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(FEW, WIDTH, dtype=x.dtype)
        if self.way == "lean" and self.ours:
            with rg.lean():
                return self.model(x)
        if self.way == "unroll" and self.ours:
            return rg.unroll(self.model, x, h, memory=self.memory)[0]
        if self.way in CELL:
            return self.model(x, h)[0] if self.ours else looped(self.model, x, h)
        return self.model(x)

    def drive(self, forward: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
        with self.world.casts():
            y = forward(x)
        self.world.between(self.model)
        (y * v).sum().backward()
        return y

    def streamed(self) -> Tensor:
        x, v, h = self.x, self.v, torch.zeros(FEW, WIDTH, dtype=self.x.dtype)
        with self.world.casts():
            if self.ours:
                loss = lambda t, y: (y * v[t]).sum()  # noqa: E731
                return rg.bptt(self.model, x, h, loss=loss, memory=self.memory)[0]
            y = looped(self.model, x, h)
        (total := (y * v).sum()).backward()
        return total.double()

    def step(self) -> dict[str, Any]:
        """One training step, and all that it leaves behind."""
        model, world = self.model, self.world
        self.optimizer.zero_grad()
        with world.around():
            if self.way == "bptt":
                y = self.streamed()
            else:
                drive = world.drive or self.drive
                y = drive(self.forward if world.drive is None else self.called(), self.x, self.v)
        loss = float((y.detach() * self.v).sum() if self.way != "bptt" else y)
        left: dict[str, Any] = {"output": y.detach()}
        if self.way != "bptt":
            left["whether it requires a gradient"] = y.requires_grad
        if world.unrepeatable:
            for net in (m for m in model.modules() if isinstance(m, Habit)):
                euler = float((net.b.weight.grad * net.b.weight).sum())
                if abs(euler - loss) > 1e-9 * (abs(loss) + 1):
                    return {"Euler": f"{euler / loss:.6f} times the loss"}
            left = {}
        left |= {f"gradient of {k}": p.grad for k, p in self.named("parameters")}
        left = {k: v.clone() if isinstance(v, Tensor) else v for k, v in left.items()}
        self.optimizer.step()
        left |= {k: p.detach().clone() for k, p in self.named("parameters")}
        left |= {k: b.clone() for k, b in self.named("buffers")}
        left["torch's generator"] = torch.get_rng_state()
        left["Python's generator"] = random.getstate()
        left["NumPy's generator"] = str(np.random.get_state())
        left[HIDDEN] = world.told()
        world.after(model)
        return {} if world.unrepeatable else left

    def called(self) -> Any:
        """What a program's own drive is given: functional_call wants the module itself."""
        return self.model if self.way in ("budget", "Sequential") else self.forward

    def named(self, kind: str) -> list[tuple[str, Tensor]]:
        found = getattr(self.model, f"named_{kind}")()
        return [(name.removeprefix("cell."), t) for name, t in found]


def same(mine: Any, theirs: Any, tolerance: float) -> bool:
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        pairs = zip(mine, theirs, strict=False)
        return len(mine) == len(theirs) and all(same(a, b, tolerance) for a, b in pairs)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        if torch.equal(mine, theirs):
            return True
        is_real = mine.is_floating_point() or mine.is_complex()
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not is_real:
            return False
        return bool((mine - theirs).norm() <= tolerance * theirs.norm())
    if isinstance(mine, float) and isinstance(theirs, float):
        return abs(mine - theirs) <= tolerance * abs(theirs)
    return bool(mine == theirs)


def differs(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> str:
    if "Euler" in mine:
        return f"Euler's identity: {mine['Euler']}"
    keys = [k for k in theirs if not (k in mine and same(mine[k], theirs[k], tolerance))]
    return ", ".join(keys[:3])


def run(name: str, way: str, memory: Any, *, named: bool = False) -> tuple[str, str]:
    """The verdict of one run, and what was said or what differed.

    A budget that is too small is raised once, to the least that the error names.
    """
    plain, expected, error = Trial(name, way, None, ours=False), [], None
    try:
        expected = [plain.step() for _ in range(STEPS)]
        assert not any("Euler" in one for one in expected), expected
    except Exception as raised:
        error = raised
    finally:
        plain.world.close()
    world = plain.world
    tolerance = world.tolerance if way in CHAIN else 1e-8 if world.dtype == torch.float64 else 3e-2
    trial, step, phase = Trial(name, way, memory, ours=True), 0, "refused"
    repeated = ""
    try:
        trial.begin()
        for step in range(STEPS):
            left = trial.step()
            found = differs(left, expected[step], tolerance) if error is None else ""
            if found not in ("", HIDDEN):
                return "WRONG", f"step {step}: {found}"
            repeated = repeated or (
                found and f"step {step}: {left[HIDDEN]} for {expected[step][HIDDEN]}"
            )
            phase = "error in the pass"
    except rg.BudgetError as refusal:
        if not named:
            return run(name, way, refusal.minimum_bytes, named=True)
        return "least refused", f"step {step}: {refusal}"
    except rg.RetrogradeError as refusal:
        return phase, f"step {step}: {refusal}"
    except Exception as raised:
        if type(raised) is type(error):
            return "exact", f"raises as the plain program: {raised}"
        return "raw error", f"step {step}: {place_of(raised)}"
    finally:
        trial.world.close()
    if error:
        return "WRONG", f"no error where the plain program raises {error}"
    return ("exact, effects repeated", repeated) if repeated else ("exact", "")


def program(name: str) -> dict[str, Any]:
    """A row of the table: one program by all the ways that it can run."""
    world, row = World(WIDTH), {}
    default = world.between
    PROGRAMS[name](world)
    world.close()
    streams = world.drive is None and world.between.__code__ is default.__code__
    for way in world.ways:
        if way == "bptt" and not streams:
            continue
        found = []
        for memory in MEMORIES.get(way, ("45%" if way in CHAIN else "25%",)):
            given = 1 if memory == "least" else memory
            verdict, said = run(name, way, given)
            found.append((VERDICTS.index(verdict), str(memory), said))
        worst, memory, said = min(found)
        row[way] = {"verdict": VERDICTS[worst], "memory": memory, "said": said[:400]}
    return {"program": name, "ways": row}
