"""Integer arrays of patterns as tensors, on whichever devices they are used."""

import torch
from torch import Tensor

__all__ = ["OnDevices"]


class OnDevices:
    """Has integer arrays as attributes, and gives them as tensors, put on each device once.

    A device keeps its copies for as long as the object is there: a scan uses them in every
    iteration, and to copy them takes longer than to compute with them.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """One of the arrays as a tensor.

        Args:
            name: of the attribute.
            device: where; on the CPU the tensor and the array are the same memory.

        Returns:
            The tensor, not to be changed.

        Example:
            >>> from retrograde.jacobians.factor import identity
            >>> from retrograde.jacobians.pattern import Pattern
            >>> Pattern(identity(2)).tensor("indices", torch.device("cpu")).tolist()
            [0, 1]
        """
        found = self._tensors.get((name, device))
        if found is None:
            # What an inference makes would be of no use to a training after it.
            with torch.inference_mode(False):
                found = torch.from_numpy(getattr(self, name)).to(device)
            self._tensors[name, device] = found
        return found
