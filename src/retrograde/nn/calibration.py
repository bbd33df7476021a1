"""The time of each backward algorithm on this machine: measured once, kept in a file.

An algorithm has a fixed cost for a call (launches, set-up) and a latency for each step. Both depend
on the cell, its sizes and the batch, and no formula predicts them well. So they are measured at the
call's own width, on short sequences of doubling lengths, all algorithms in turn. Times are
interpolated between the measured lengths, and extrapolated with the last latency.

The file is ``retrograde/ways.json`` in the user's cache folder; delete it to measure again.
"""

import functools
import hashlib
import json
import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrograde import scan
from retrograde.machine import machine_of, now
from retrograde.nn.weights import last_weights, over_weights, stand_ins

__all__ = ["BACKWARDS", "Timing", "cache_file", "contenders", "timings"]

#: torch's own backward pass first, then ours.
BACKWARDS = ("torch", "sequential", "scan")

_FIRST_STEPS = 32
# Lengths double until the fastest takes this long. Where the second is close, lengths go further,
# since only sequences that outgrow every cache show which is faster in the long run.
_LONG_ENOUGH_SECONDS = 0.01
_CLOSE = 1.5
_LONG_ENOUGH_WHERE_CLOSE = 0.1
_HOPELESS = 4.0  # an algorithm slower than the fastest by this factor is dropped
_REPEATS = 3

Point = tuple[int, float]


@dataclass(frozen=True)
class Timing:
    """The time of one algorithm, forward and backward together: measured pairs (steps, seconds).
    Steps increase."""

    points: tuple[Point, ...]

    @property
    def call_seconds(self) -> float:
        """The cost of a call, its steps aside."""
        steps, seconds = self.points[-1]
        return max(0.0, seconds - steps * self.step_seconds)

    @property
    def step_seconds(self) -> float:
        """The cost of one more step."""
        (a, low), (b, high) = ((0, 0.0), *self.points)[-2:]
        return max((high - low) / (b - a), 0.0)

    def seconds(self, steps: int) -> float:
        """Return the expected seconds: linear between the points, with the last slope beyond."""
        last, seconds = self.points[-1]
        if steps >= last:
            return seconds + (steps - last) * self.step_seconds
        at = bisect_left(self.points, (steps, 0.0))
        if at == 0:
            return self.points[0][1]
        (a, low), (b, high) = self.points[at - 1], self.points[at]
        return low + (high - low) * (steps - a) / (b - a)


def cache_file() -> Path:
    """Return the file of timings, in the user's cache folder by the XDG convention."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "retrograde" / "ways.json"


# The timings that this process has measured or read.
_KNOWN: dict[str, dict[str, Timing]] = {}


def timings(module: nn.RNNBase, samples: int, steps: int, needs_x: bool) -> dict[str, Timing]:
    """Return the timing of every one of :data:`BACKWARDS`, measured unless the file has it. The
    module is one of ours; another one over the same weights runs, on sequences of at most ``steps``
    steps."""
    key = _key(module, samples, needs_x)
    found = _KNOWN.get(key) or _read().get(key)
    if found is None or not _reaches(found, steps):
        found = _measure(module, samples, steps, needs_x)
        _write(key, found)
    _KNOWN[key] = found
    return found


def _reaches(found: dict[str, Timing], steps: int) -> bool:
    """Return whether the measurements are long enough for a length."""
    last = [found[name].points[-1] for name in contenders(found)]
    return last[0][0] >= steps or _tells([seconds for _, seconds in last])


def _tells(seconds: list[float]) -> bool:
    """Return whether the times at one length decide which algorithm is faster at longer ones."""
    best, *others = sorted(seconds)
    close = bool(others) and others[0] < _CLOSE * best
    return best >= (_LONG_ENOUGH_WHERE_CLOSE if close else _LONG_ENOUGH_SECONDS)


def contenders(found: dict[str, Timing]) -> list[str]:
    """Return the algorithms that :func:`timings` measured to the greatest length. Hopeless ones are
    dropped early."""
    last = max(timing.points[-1][0] for timing in found.values())
    return [name for name, timing in found.items() if timing.points[-1][0] == last]


def _key(module: nn.RNNBase, samples: int, needs_x: bool) -> str:
    weights = last_weights(module)
    weight, trained = weights[0], [w.requires_grad for w in weights]
    options = (module.num_layers, module.bidirectional, module.bias, module.dropout)
    return json.dumps(
        {
            "machine": _machine(weight.device, torch.get_num_threads()),
            "code": _code(),
            "cell": [module.mode, module.input_size, module.hidden_size, *options],
            "call": [samples, str(weight.dtype), needs_x, module.training, all(trained)],
        }
    )


@functools.cache
def _code() -> str:
    """Return a hash of the present code, since other code takes another time."""
    files = sorted(Path(scan.__file__).parent.rglob("*.py"))
    return hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@functools.cache
def _machine(device: torch.device, threads: int) -> dict[str, str | int]:
    return machine_of(device)


def _measure(module: nn.RNNBase, samples: int, steps: int, needs_x: bool) -> dict[str, Timing]:
    trial = over_weights(module, stand_ins(last_weights(module)), type(module))
    trial.memory, trial.schedule, trial.batch_first = None, None, False
    device: Any = trial._flat_weights[0].device
    points: dict[str, list[Point]] = {name: [] for name in BACKWARDS}
    racing = set(BACKWARDS)
    length = min(_FIRST_STEPS, steps)
    devices = [device] if device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices):
        for name in BACKWARDS:  # first calls compile and allocate, so they are not timed
            _run(trial, name, min(length, 8), samples, needs_x)
        while True:
            seconds = dict.fromkeys(racing, float("inf"))
            for _ in range(_REPEATS):
                for name in seconds:
                    taken = _run(trial, name, length, samples, needs_x)
                    seconds[name] = min(seconds[name], taken)
            best = min(seconds.values())
            for name, taken in seconds.items():
                points[name].append((length, taken))
                if taken > _HOPELESS * best and length > _FIRST_STEPS:
                    racing.discard(name)
            if length >= steps or _tells([seconds[name] for name in racing]):
                break
            length = min(2 * length, steps)
    return {name: Timing(tuple(found)) for name, found in points.items()}


def _run(trial: Any, name: str, steps: int, samples: int, needs_x: bool) -> float:
    """Return the seconds of one call forward and backward, without overrides of derived classes."""
    from retrograde.nn.recurrent import BudgetedRNN

    trial.backward = None if name == "torch" else name
    weight = trial._flat_weights[0]
    x = torch.randn(steps, samples, trial.input_size, dtype=weight.dtype, device=weight.device)
    x.requires_grad_(needs_x)
    leaves = [t for t in (x, *trial._flat_weights) if t.requires_grad]
    start = now(weight.device)
    outputs = BudgetedRNN.forward(trial, x)[0]
    torch.autograd.grad(outputs, leaves, torch.ones_like(outputs))
    return now(weight.device) - start


def _read() -> dict[str, dict[str, Timing]]:
    """Return the content of the file; empty if there is none or it cannot be read."""
    try:
        content = json.loads(cache_file().read_text(encoding="utf-8"))
        return {
            key: {n: Timing(tuple((int(a), float(b)) for a, b in found[n])) for n in BACKWARDS}
            for key, found in content.items()
            if all(found[name] for name in BACKWARDS)
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write(key: str, found: dict[str, Timing]) -> None:
    """Add an entry to the file; if that is impossible, it is measured again next time."""
    content = {k: {name: t.points for name, t in v.items()} for k, v in _read().items()}
    content[key] = {name: timing.points for name, timing in found.items()}
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError:
        pass
