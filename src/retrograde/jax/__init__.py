"""Schedules inside a compiled JAX scan: ``import retrograde.jax as rj``. JAX must be installed.

:func:`scan` is ``jax.lax.scan`` with a memory budget or a schedule for its backward pass, and
:func:`while_loop` is ``jax.lax.while_loop`` with such a backward pass.
:func:`fit` returns the plan that a budget allows, without running it. See ``docs/jax.md``.
"""

from retrograde.jax.scan import fit, scan, while_loop

__all__ = ["fit", "scan", "while_loop"]
