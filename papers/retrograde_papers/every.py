"""Every figure that is drawn of both papers, by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gruslys2016.deep_figures import DEEP
from gruslys2016.figures import GRUSLYS
from retrograde_papers.plates import Plate
from wang2020.figures import WANG
from wang2020.ranks_figures import RANKS

__all__ = ["PLATES"]

PLATES: Mapping[str, Callable[[], Plate]] = MappingProxyType({**GRUSLYS, **WANG, **DEEP, **RANKS})
