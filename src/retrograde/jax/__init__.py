"""The same schedules inside a compiled scan: ``import retrograde.jax as rj``. It needs JAX.

:func:`scan` has the signature of ``jax.lax.scan`` and one argument more; :func:`fit` says what a
budget buys. See ``docs/jax.md``.
"""

from retrograde.jax.scan import fit, scan

__all__ = ["fit", "scan"]
