"""The types of what writes LLVM code, under short names.

An *intrinsic* is a function that numba calls with the types of arguments. It returns a signature,
and a function that writes the code. Neither numba nor llvmlite has
annotations that a type checker can use.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir

Kind: TypeAlias = Any  # a type of numba's
Signature: TypeAlias = Any  # numba's, of a function
Target: TypeAlias = Any  # what numba compiles for
Builder: TypeAlias = ir.IRBuilder
Value: TypeAlias = ir.Value
Args = Sequence[Value]
Written = tuple[Signature, Callable[[Target, Builder, Signature, Args], Value]]
