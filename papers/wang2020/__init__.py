"""The recurrent experiments of Wang, *BPPSA* (2020): bitstreams (4.1, 5.1), instruments (4.2, 5.2).

One network is trained in several ways that compute the same gradient: by torch's own module, and by
this library's with ``memory="100%"``, whose sweep is compiled, and ``backward="scan"``. All start
from the same weights, read the same batches, and take turns in one process, iteration by iteration.
What is measured is a :class:`wang2020.results.Results`, and figures 5.1 to 5.4 are drawn from it.
The commands are ``bench bitstream`` and ``bench instruments``.

Nothing is imported here, since the command's help is to come without torch.
"""

__all__: list[str] = []
