"""Backpropagation as a scan over transposed Jacobians (Wang, BPPSA, 2020).

The scans work on any associative element: :func:`linear`, :func:`blelloch`, :func:`hybrid` and
:func:`chunked`. :func:`reference` is their oracle, and a :class:`Report` counts their work.
:func:`gradients` scans where every step has its own loss. Nothing here loads torch. Sparse
Jacobians (:class:`CSR`, :func:`transposed_jacobian`, :func:`register_layer`) are loaded on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from retrograde.scan.blelloch import blelloch, chunked, gradients, hybrid, linear, reference
from retrograde.scan.elements import IDENTITY, UNREAD, Affine, Dense, Diagonal, Vector, combine
from retrograde.scan.work_report import Report

if TYPE_CHECKING:
    from retrograde.scan.sparse.csr import CSR
    from retrograde.scan.sparse.rules import register_layer
    from retrograde.scan.sparse.transposed import transposed_jacobian

__all__ = [
    "CSR", "IDENTITY", "UNREAD", "Affine", "Dense", "Diagonal", "Report", "Vector", "blelloch",
    "chunked", "combine", "gradients", "hybrid", "linear", "reference", "register_layer",
    "transposed_jacobian",
]  # fmt: skip

_HOMES = {
    "CSR": "retrograde.scan.sparse.csr",
    "register_layer": "retrograde.scan.sparse.rules",
    "transposed_jacobian": "retrograde.scan.sparse.transposed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'retrograde.scan' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
