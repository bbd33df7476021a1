"""The figures of Gruslys et al., *Memory-Efficient Backpropagation Through Time* (2016).

Appendix C's chains are there too: what deep networks take within a budget, planned and measured.

Nothing is imported here, since the command's help is to come without torch.
"""

__all__: list[str] = []
