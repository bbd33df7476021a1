"""What surrounds a call in torch: switches and modes, to be set as they were when it runs again.

A switch is whatever torch can get and set without an argument. They say which attention and which
convolution runs, and in which precision matrices are multiplied. So a newer torch's switches are
among them. Autocast, the default type, the number of threads, and the modes of ``torch.overrides``
and of dispatch are noted too.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from retrograde.torch_private import switches

_NO_SWITCHES = re.compile("thread_name|warn|trac|graph|deterministic_algorithms")
Switch = tuple[Callable[[], Any], Callable[[Any], None]]


@cache
def _switches() -> Sequence[Switch]:
    """Return what gets and sets each switch of this torch."""
    pairs: list[Switch] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    ]
    for name in dir(switches):
        other = re.sub("_get_(.*)_sdp_enabled", r"_set_sdp_use_\1", name)
        put = getattr(switches, other.replace("_get_", "_set_", 1), None)
        if name.startswith("_get_") and put is not None and not _NO_SWITCHES.search(name):
            get = getattr(switches, name)
            with suppress(TypeError, RuntimeError):  # it takes an argument, or has no value here
                if isinstance(get(), bool | int | str | list):
                    pairs.append((get, put))
    return pairs


class Switches:
    """The switches and modes at one moment, of a call on a device, and ``others`` of its own."""

    def __init__(self, device: torch.device, others: Sequence[Switch] = ()) -> None:
        self.switches = [*_switches(), *_STACKS, *others]
        self.values = [get() for get, _ in self.switches]
        self.device, self.casts = device, _casts(device)

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """Set all of them in a block to what they were, if they differ."""
        each = zip(self.switches, self.values, strict=True)
        now = [(put, then, value) for (get, put), then in each if (value := get()) is not then]
        differ = [one for one in now if not _same(*one[1:])]
        for put, then, _ in differ:
            put(then)
        is_off = not self.casts["enabled"] and self.casts == _casts(self.device)
        try:
            with nullcontext() if is_off else torch.autocast(self.device.type, **self.casts):
                yield
        finally:
            for put, _, value in differ:
                put(value)


def _same(a: Any, b: Any) -> bool:
    return not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b)


def _stack(get: Any, push: Any, pop: Any) -> Switch:
    """Return a switch for a stack of modes. This library's own modes are above all others."""

    def is_ours(mode: Any) -> bool:
        return bool(type(mode).__module__.startswith("retrograde."))

    def put(modes: list[Any]) -> None:
        ours = [mode for mode in [pop() for _ in get()][::-1] if is_ours(mode)]
        for mode in (*modes, *ours):
            push(mode)

    return lambda: [mode for mode in get() if not is_ours(mode)], put


_STACKS = [
    _stack(overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode),
    _stack(dispatch._get_current_dispatch_mode_stack, dispatch._push_mode, dispatch._pop_mode),
]


def autocast_as_now(device: torch.device) -> torch.autocast:
    """Return a context that sets autocast as it is at this moment, to be entered later (rule 4).
    Its weight cache is off: a cached cast would join the graphs of different steps."""
    return torch.autocast(device.type, **_casts(device))


def _casts(device: torch.device) -> dict[str, Any]:
    is_on, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return {"enabled": is_on, "dtype": dtype, "cache_enabled": False}


def cast_context(device: torch.device) -> Any:
    """Return an object that stands for the present autocast context, as long as that is open. It is
    the node of a parameter's cast, which autocast's cache keeps."""
    if device not in _PROBES:
        _PROBES[device] = torch.nn.Parameter(torch.ones(1, 1, device=device))
    probe = _PROBES[device]
    with torch.enable_grad():
        node: Any = torch.mm(probe.detach(), probe).grad_fn
    return node.next_functions[1][0]


_PROBES: dict[torch.device, torch.nn.Parameter] = {}
