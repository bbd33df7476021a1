"""What the experiments of both papers share, and the commands that run and draw them.

:mod:`gruslys2016` and :mod:`wang2020` are the papers themselves. All three use the library as any
program would.
"""

__all__: list[str] = []
