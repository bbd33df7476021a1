"""Backpropagation as a scan over transposed Jacobians (Wang, BPPSA, 2020).

The scan itself, over any associative element: :func:`linear`, :func:`blelloch`, :func:`hybrid` and
:func:`chunked`, with :func:`reference` as their oracle and a :class:`Report` of what they did;
:func:`gradients` where every step has a loss of its own. Nothing here loads torch: the modules that
run recurrent networks this way (:mod:`retrograde.scan.layer`) are loaded when they are needed.
"""

from retrograde.scan.blelloch import blelloch, chunked, gradients, hybrid, linear
from retrograde.scan.elements import IDENTITY, Affine, Dense, Diagonal, Vector, combine
from retrograde.scan.reference import reference
from retrograde.scan.report import Report

__all__ = [
    "IDENTITY",
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
]
