"""A chain: what each layer of a deep network takes, in seconds and bytes.

Layers are numbered as steps are: layer k turns hidden state k into hidden state k+1. A hidden state
is what one layer hands to the next; hidden state 0 is the chain's input, which the caller holds,
and the last one its output, which the caller is handed: neither counts. All the others do, and so
does the gradient of a hidden state, which takes what the state takes; more, where a layer hands on
what it was given, as a tuple ``(y, skip)`` is.

Recording a layer keeps its *internal state*: all that its backward pass will need.
``internal_bytes`` is what that holds beyond the layer's input, its output included (a of Gruslys et
al. 2016, appendix C). Most layers' tapes refer to their input or to their output, which are then
held as long as the tape is; some do not (a ReLU needs only its output, a residual sum neither), and
a state that nobody refers to is not held: ``keeps_input``, ``keeps_output``.

Numbers only; measured ones come from :func:`retrograde.profile`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from math import isfinite
from typing import Any

from retrograde.errors import ScheduleError
from retrograde.units import aligned, format_bytes

__all__ = ["Chain"]

_FORMAT = "retrograde-chain"
_VERSION = 1
_SECONDS = ("forward_seconds", "backward_seconds")
_BYTES = (
    "output_bytes",
    "output_gradient_bytes",
    "internal_bytes",
    "forward_transient_bytes",
    "record_transient_bytes",
    "backward_transient_bytes",
    "release_bytes",
)
_FLAGS = ("keeps_input", "keeps_output")


@dataclass(frozen=True)
class Chain:
    """The layers of a deep network, as columns of equal length, one entry a layer.

    Args:
        forward_seconds: running the layer once, whether or not it is recorded.
        backward_seconds: backpropagating it, and whatever recording takes beyond running.
        output_bytes: its output, the hidden state that it hands on.
        internal_bytes: what recording it keeps beyond its input, its output included; by default
            its output alone.
        forward_transient_bytes: what running it takes for a while, beyond input and output; none
            by default.
        backward_transient_bytes: what backpropagating it takes for a while, beyond its internal
            state and the gradients of its input and its output; none by default.
        record_transient_bytes: what recording it takes for a while, beyond its input and its
            internal state; as ``forward_transient_bytes`` by default.
        release_bytes: how much less backpropagating it takes where nobody but its internal state
            holds its input, which then is let go of before the peak; nothing by default.
        keeps_input: whether its internal state refers to its input; yes by default.
        keeps_output: whether its internal state refers to its output; yes by default.
        names: what to call the layers; their numbers by default.
        input_bytes: the chain's input; told, and not counted.
        overhead_bytes: what is held from first to last, whatever is stored.
        output_gradient_bytes: the gradient of its output; as ``output_bytes`` by default.
        hands_on: the earlier hidden states whose memory its output still refers to, for it hands
            on what it was given; none by default. A plan takes these to be held throughout.

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
    release_bytes: Sequence[int] = ()
    keeps_input: Sequence[bool] = ()
    keeps_output: Sequence[bool] = ()
    names: Sequence[str] = ()
    input_bytes: int = 0
    overhead_bytes: int = 0
    output_gradient_bytes: Sequence[int] = ()
    hands_on: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        length = len(self.forward_seconds)
        if not length:
            raise ScheduleError("the chain has no layers: expected at least one")
        defaults: dict[str, Sequence[Any]] = {
            "internal_bytes": self.output_bytes,
            "output_gradient_bytes": self.output_bytes,
            "forward_transient_bytes": [0] * length,
            "backward_transient_bytes": [0] * length,
            "record_transient_bytes": self.forward_transient_bytes or [0] * length,
            "release_bytes": [0] * length,
            "keeps_input": [True] * length,
            "keeps_output": [True] * length,
            "hands_on": [()] * length,
            "names": [str(k) for k in range(length)],
        }
        for name in (*_SECONDS, *_BYTES, *_FLAGS, "hands_on", "names"):
            column = tuple(getattr(self, name)) or tuple(defaults.get(name, ()))
            if len(column) != length:
                raise ScheduleError(
                    f"{name} has {len(column)} entries and forward_seconds has {length}: expected "
                    "one for each layer"
                )
            object.__setattr__(self, name, tuple(_entry(name, k, v) for k, v in enumerate(column)))
        for name in ("input_bytes", "overhead_bytes"):
            object.__setattr__(self, name, _entry(name, None, getattr(self, name)))
        for k, (whole, output) in enumerate(
            zip(self.internal_bytes, self.output_bytes, strict=True)
        ):
            if whole < output:
                raise ScheduleError(
                    f"internal_bytes[{k}] is {whole} and output_bytes[{k}] is {output}: expected "
                    "at least as many, for an internal state is counted with its output"
                )

    def __len__(self) -> int:
        return len(self.forward_seconds)

    @property
    def ordinary_seconds(self) -> float:
        """An iteration of ordinary backpropagation: every layer forward and backward once."""
        return sum(self.forward_seconds) + sum(self.backward_seconds)

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """What holding each hidden state takes, 0 … len(chain): none for the first and the last."""
        return (0, *self.output_bytes[:-1], 0)

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """What the gradient of each hidden state takes; the first one's is the caller's."""
        return (0, *self.output_gradient_bytes)

    @property
    def standing_bytes(self) -> int:
        """What a plan takes to be held from first to last: the overhead, and what is handed on."""
        states = self.state_bytes
        return self.overhead_bytes + sum(states[at] for at in {*chain(*self.hands_on)})

    @property
    def tape_bytes(self) -> tuple[int, ...]:
        """What each internal state holds besides the layer's input and output."""
        pairs = zip(self.internal_bytes, self.output_bytes, strict=True)
        return tuple(whole - output for whole, output in pairs)

    def to_json(self) -> str:
        """The chain as one line of JSON text, which :meth:`from_json` reads."""
        document = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        if self.output_gradient_bytes == self.output_bytes:
            del document["output_gradient_bytes"]
        if not any(self.hands_on):
            del document["hands_on"]
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Chain":
        """Read what :meth:`to_json` wrote.

        Raises:
            ScheduleError: the text is malformed; the message says where.
        """
        try:
            document = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ScheduleError(f"not a chain: the text is no JSON ({error})") from None
        known = [("format", _FORMAT), ("version", _VERSION)]
        if (
            not isinstance(document, dict)
            or [(key, document.pop(key, None)) for key, _ in known] != known
        ):
            raise ScheduleError(
                f"not a chain: expected a JSON object with the format {_FORMAT!r}, version "
                f"{_VERSION}"
            )
        names = {field.name for field in fields(cls)}
        unlike = (document.keys() ^ names) - {"output_gradient_bytes", "hands_on"}
        if unlike:
            odd = ", ".join(sorted(map(repr, unlike)))
            raise ScheduleError(f"not a chain: missing or unknown: {odd}")
        try:
            return cls(**document)
        except TypeError as error:
            raise ScheduleError(f"not a chain: {error}") from None

    def __str__(self) -> str:
        rows = [("layer", "forward", "backward", "output", "internal", "transient")]
        for k, name in enumerate(self.names):
            transient = max(
                self.forward_transient_bytes[k],
                self.record_transient_bytes[k],
                self.backward_transient_bytes[k],
            )
            rows.append(
                (
                    name,
                    f"{1e3 * self.forward_seconds[k]:.3g} ms",
                    f"{1e3 * self.backward_seconds[k]:.3g} ms",
                    format_bytes(self.output_bytes[k]),
                    format_bytes(self.internal_bytes[k]),
                    format_bytes(transient),
                )
            )
        return aligned(rows)


def _entry(name: str, k: int | None, value: Any) -> Any:
    """One entry of a column, as it is kept."""
    where = name if k is None else f"{name}[{k}]"
    if name == "names":
        return str(value)
    if name in _FLAGS:
        if isinstance(value, bool | int) and value in (0, 1):
            return bool(value)
        raise ScheduleError(f"{where} is {value!r}: expected True or False")
    if name == "hands_on":
        if all(type(at) is int and 0 < at <= (k or 0) for at in value):
            return tuple(value)
        raise ScheduleError(f"{where} is {value!r}: expected numbers of states, 1 … {k}")
    if name in _SECONDS:
        if isinstance(value, int | float) and isfinite(value) and value >= 0:
            return float(value)
        raise ScheduleError(f"{where} is {value!r}: expected seconds, finite and not negative")
    if type(value) is int and value >= 0:
        return value
    raise ScheduleError(f"{where} is {value!r}: expected bytes, an integer of 0 or more")
