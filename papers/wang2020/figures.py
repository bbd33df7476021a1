"""The figures of Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm* (2020).

Figures 3.1 and 3.3 and table 3.1, in ``wang_jacobians``, show the scan and the Jacobians of VGG-11;
figure 3.4, in ``wang_training``, LeNet-5 in training; figure 5.5, in ``wang_flops``, what each step
of a pruned VGG-11 takes. Of the recurrent ones, figures 5.1 and 5.3 are losses, in ``wang_curves``,
and figures 5.2 and 5.4 seconds, in ``wang_seconds``. What is measured comes with the library and is
drawn unless other numbers are given; every caption names its machine.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType

from retrograde_papers.plates import Plate
from wang2020.flops import figure_5_5
from wang2020.loss_figures import figure_5_1, figure_5_3
from wang2020.results import Results
from wang2020.seconds_figures import figure_5_2, figure_5_4
from wang2020.training_figures import figure_3_4

__all__ = ["WANG", "plates_of"]


def _jacobians(name: str) -> Plate:
    """A figure for which torch is needed."""
    return getattr(import_module("wang2020.jacobian_figures"), name)()  # type: ignore[no-any-return]


WANG: Mapping[str, Callable[[], Plate]] = MappingProxyType(
    {
        "figure_3_1": partial(_jacobians, "figure_3_1"),
        "table_3_1": partial(_jacobians, "table_3_1"),
        "figure_3_3": partial(_jacobians, "figure_3_3"),
        "figure_3_4": figure_3_4,
        "figure_5_1": figure_5_1,
        "figure_5_2": figure_5_2,
        "figure_5_3": figure_5_3,
        "figure_5_4": figure_5_4,
        "figure_5_5": figure_5_5,
    }
)


def plates_of(results: Results) -> list[Plate]:
    """The figures for which an experiment has the numbers.

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
