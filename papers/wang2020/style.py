"""The ways of computing a gradient, as the figures of Wang, *BPPSA* (2020), show them.

Its captions draw torch in red and the scan in blue.
"""

from retrograde_papers.curves import BLUE, GREEN, RED

__all__ = ["colour_of", "label_of"]

_COLOURS = {"torch": RED, "sequential": GREEN, "scan": BLUE}


def colour_of(way: str) -> str:
    """The colour of a way, the same in every figure."""
    return _COLOURS[way]


def label_of(way: str, cell: object) -> str:
    """What a legend calls a way.

    Example:
        >>> label_of("torch", "gru"), label_of("scan", "gru")
        ('torch.nn.GRU', 'backward="scan"')
    """
    names = {"torch": f"torch.nn.{str(cell).upper()}", "sequential": "one compiled sweep"}
    return names.get(way, f'backward="{way}"')
