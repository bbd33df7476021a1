"""Backpropagation as a scan over transposed Jacobians (Wang, BPPSA, 2020).

The scan itself, over any associative element: :func:`linear`, :func:`blelloch`, :func:`hybrid` and
:func:`chunked`, with :func:`reference` as their oracle and a :class:`Report` of what they did;
:func:`gradients` where every step has a loss of its own. Nothing here loads torch: the modules that
run recurrent networks this way (:mod:`retrograde.scan.layer`) are loaded when they are needed, and
so are sparse Jacobians (:class:`CSR`, :func:`transposed_jacobian`, :func:`register_layer`) and the
scan across processes (:func:`scan_ranks`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from retrograde.scan.blelloch import blelloch, chunked, gradients, hybrid, linear
from retrograde.scan.elements import IDENTITY, UNREAD, Affine, Dense, Diagonal, Vector, combine
from retrograde.scan.reference import reference
from retrograde.scan.report import Report

if TYPE_CHECKING:
    from retrograde.scan.ranks import scan_ranks
    from retrograde.scan.sparse.csr import CSR
    from retrograde.scan.sparse.jacobian import transposed_jacobian
    from retrograde.scan.sparse.rules import register_layer

__all__ = [
    "CSR",
    "IDENTITY",
    "UNREAD",
    "Affine",
    "Dense",
    "Diagonal",
    "Report",
    "Vector",
    "blelloch",
    "chunked",
    "combine",
    "gradients",
    "hybrid",
    "linear",
    "reference",
    "register_layer",
    "scan_ranks",
    "transposed_jacobian",
]

_HOMES = {
    "CSR": "retrograde.scan.sparse.csr",
    "register_layer": "retrograde.scan.sparse.rules",
    "scan_ranks": "retrograde.scan.ranks",
    "transposed_jacobian": "retrograde.scan.sparse.jacobian",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'retrograde.scan' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
