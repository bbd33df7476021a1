"""The recurrent figures of Wang, *BPPSA: Scaling Back-propagation by Parallel Scan* (2020).

Figures 5.1 and 5.3 are losses, in ``wang_curves``; figures 5.2 and 5.4 are seconds, in
``wang_seconds``. All four are measurements: those that come with the library are drawn unless
others are given, and every caption names its machine.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from retrograde.figures.plates import Plate
from retrograde.figures.wang_curves import figure_5_1, figure_5_3
from retrograde.figures.wang_results import Results
from retrograde.figures.wang_seconds import figure_5_2, figure_5_4

__all__ = ["WANG", "plates_of"]

WANG: Mapping[str, Callable[[], Plate]] = MappingProxyType(
    {
        "figure_5_1": figure_5_1,
        "figure_5_2": figure_5_2,
        "figure_5_3": figure_5_3,
        "figure_5_4": figure_5_4,
    }
)


def plates_of(results: Results) -> list[Plate]:
    """The figures for which an experiment has the numbers.

    Args:
        results: of ``retrograde bench bitstream`` or ``retrograde bench instruments``.

    Returns:
        The curves of figure 5.1 or 5.3, and the seconds of 5.2 or 5.4, where there are any.

    Example:
        >>> plates_of(Results("bitstream"))
        []
    """
    plates = []
    of_bitstreams = results.experiment == "bitstream"
    if results.curves:
        plates.append((figure_5_1 if of_bitstreams else figure_5_3)(results))
    if results.timings is not None:
        plates.append((figure_5_2 if of_bitstreams else figure_5_4)(results))
    return plates
