"""A chain: the seconds and bytes of each layer of a deep network.

Layers are numbered as steps are: layer k turns hidden state k into hidden state k+1. Hidden state 0
is the chain's input, which the caller holds. The last hidden state is the chain's output, which the
caller receives. Neither counts against a budget; all other states do. So does the gradient of a
hidden state, which is as large as the state.

Recording a layer keeps its *internal state*: all that its backward pass needs. ``internal_bytes``
is the size of that beyond the layer's input, its output included (a of Gruslys et al. 2016,
appendix C). The tapes of most layers refer to their input or output and so hold it. Some do not: a
ReLU needs only its output, and a residual sum needs neither. A state without a reference is not
held. ``keeps_input`` and ``keeps_output`` say which states a tape refers to.

This module has numbers only; :func:`retrograde.profile` measures them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from retrograde.errors import ScheduleError
from retrograde.schedule.json_text import fail, read, write
from retrograde.units import aligned, format_bytes

_SECONDS = ("forward_seconds", "backward_seconds")
_BYTES = (
    "output_bytes",
    "internal_bytes",
    "forward_transient_bytes",
    "record_transient_bytes",
    "backward_transient_bytes",
)
_FLAGS = ("keeps_input", "keeps_output")


@dataclass(frozen=True)
class Chain:
    """The layers of a deep network, as columns of equal length, one entry a layer.

    Args:
        forward_seconds: running the layer once, recorded or not.
        backward_seconds: backpropagating it, and the extra time of recording it.
        output_bytes: its output, the hidden state that it hands on.
        internal_bytes: its internal state beyond its input, its output included; by default its
            output alone.
        forward_transient_bytes: temporaries of running it, beyond input and output; 0 by default.
        backward_transient_bytes: temporaries of backpropagating it, beyond its internal state and
            the gradients of its input and its output; 0 by default.
        record_transient_bytes: temporaries of recording it, beyond its input and its internal
            state; as ``forward_transient_bytes`` by default.
        keeps_input: whether its internal state refers to its input; yes by default.
        keeps_output: whether its internal state refers to its output; yes by default.
        names: names of the layers; their numbers by default.
        input_bytes: the chain's input; shown, and not counted.
        overhead_bytes: bytes held throughout, whatever is stored.

    Raises:
        ScheduleError: the columns differ in length, or a number is negative, not finite or, where
            bytes are counted, no integer; or an internal state is smaller than its output.

    Example:
        >>> chain = Chain([1.0, 2.0], [2.0, 4.0], output_bytes=[100, 10], internal_bytes=[150, 10])
        >>> len(chain), chain.ordinary_seconds, chain.forward_transient_bytes
        (2, 9.0, (0, 0))
        >>> Chain.from_json(chain.to_json()) == chain
        True
    """

    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    output_bytes: Sequence[int]
    internal_bytes: Sequence[int] = ()
    forward_transient_bytes: Sequence[int] = ()
    backward_transient_bytes: Sequence[int] = ()
    record_transient_bytes: Sequence[int] = ()
    keeps_input: Sequence[bool] = ()
    keeps_output: Sequence[bool] = ()
    names: Sequence[str] = ()
    input_bytes: int = 0
    overhead_bytes: int = 0

    def __post_init__(self) -> None:
        length = len(self.forward_seconds)
        if not length:
            raise ScheduleError("the chain has no layers: expected at least one")
        defaults: dict[str, Sequence[Any]] = {
            "internal_bytes": self.output_bytes,
            "forward_transient_bytes": [0] * length,
            "backward_transient_bytes": [0] * length,
            "record_transient_bytes": self.forward_transient_bytes or [0] * length,
            "keeps_input": [True] * length,
            "keeps_output": [True] * length,
            "names": [str(k) for k in range(length)],
        }
        for name in (*_SECONDS, *_BYTES, *_FLAGS, "names"):
            column = tuple(getattr(self, name)) or tuple(defaults.get(name, ()))
            if len(column) != length:
                raise ScheduleError(
                    f"{name} has {len(column)} entries and forward_seconds has {length}: expected "
                    "one for each layer"
                )
            object.__setattr__(self, name, tuple(_entry(name, k, v) for k, v in enumerate(column)))
        for name in ("input_bytes", "overhead_bytes"):
            object.__setattr__(self, name, _entry(name, None, getattr(self, name)))
        for k, more in enumerate(self.tape_bytes):
            if more < 0:
                raise ScheduleError(
                    f"internal_bytes[{k}] is {self.internal_bytes[k]} and output_bytes[{k}] is "
                    f"{self.output_bytes[k]}: expected at least as many, since an internal state "
                    "is counted with its output"
                )

    def __len__(self) -> int:
        return len(self.forward_seconds)

    @property
    def ordinary_seconds(self) -> float:
        """Seconds of ordinary backpropagation: every layer forward and backward once."""
        return sum(self.forward_seconds) + sum(self.backward_seconds)

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of each hidden state, 0 … len(chain): 0 for the first and the last."""
        return (0, *self.output_bytes[:-1], 0)

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of each hidden state's gradient; 0 for the first, which is the caller's."""
        return (0, *self.output_bytes)

    @property
    def tape_bytes(self) -> tuple[int, ...]:
        """Bytes of each internal state without the layer's input and output."""
        pairs = zip(self.internal_bytes, self.output_bytes, strict=True)
        return tuple(whole - output for whole, output in pairs)

    def to_json(self) -> str:
        """Return the chain as one line of JSON text, which :meth:`from_json` reads."""
        return write("chain", asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Chain":
        """Read what :meth:`to_json` wrote; ScheduleError says where it is malformed."""
        try:
            return cls(**read("chain", text, [field.name for field in fields(cls)]))
        except TypeError as error:
            fail("chain", error)

    def __str__(self) -> str:
        seconds = self.forward_seconds, self.backward_seconds
        transients = (
            self.forward_transient_bytes,
            self.record_transient_bytes,
            self.backward_transient_bytes,
        )
        sizes = self.output_bytes, self.internal_bytes, map(max, *transients)
        columns = [
            self.names,
            *([f"{1e3 * duration:.3g} ms" for duration in column] for column in seconds),
            *(map(format_bytes, column) for column in sizes),
        ]
        head = "layer", "forward", "backward", "output", "internal", "transient"
        return aligned([head, *zip(*columns, strict=True)])


def _entry(name: str, k: int | None, value: object) -> Any:
    """Check one entry of a column, and return it in the type that the chain keeps."""
    where = name if k is None else f"{name}[{k}]"
    if name == "names":
        return str(value)
    if name in _FLAGS:
        if isinstance(value, bool | int) and value in (0, 1):
            return bool(value)
        raise ScheduleError(f"{where} is {value!r}: expected True or False")
    if name in _SECONDS:
        if isinstance(value, int | float) and isfinite(value) and value >= 0:
            return float(value)
        raise ScheduleError(f"{where} is {value!r}: expected seconds, finite and not negative")
    if type(value) is int and value >= 0:
        return value
    raise ScheduleError(f"{where} is {value!r}: expected bytes, an integer of 0 or more")
