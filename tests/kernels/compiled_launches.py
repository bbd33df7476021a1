"""Compile for a card, with no GPU, what the CUDA kernels' host code launches; report on it.

    compiled_launches.py ARCHITECTURE SIZE [--all]    SIZE is H, or "sparse"

A program of its own, since triton compiles or interprets, but not both in one process. One line of
JSON for each launch.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from oracles.compiled_code import LAUNCHED, loop, overwritten, unsafe

#: The shared memory that a program may have, in bytes, by architecture.
LIMITS = {75: 65_536, 80: 166_912, 86: 101_376, 90: 232_448, 120: 101_376}
POINTERS = {
    "torch.float32": "*fp32",
    "torch.float64": "*fp64",
    "torch.int32": "*i32",
    "torch.int64": "*i64",
}
ARCHITECTURE = int(sys.argv[1])


class Compiled:
    """In place of a kernel: a launch compiles it for its arguments."""

    def __init__(self, kernel, name):
        self.kernel, self.name, self.known = kernel, name, []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps, maxnreg=None, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names, types, aligned = self.kernel.arg_names, {}, []
        for parameter, arg in zip(self.kernel.params, args, strict=False):
            number, name = isinstance(arg, int), parameter.name
            types[name] = "i32" if number else POINTERS[str(arg.dtype)]
            special = number and not parameter.do_not_specialize
            if special and arg == 1:
                constants[name] = 1
            elif not number or (special and arg % 16 == 0):
                aligned.append(name)
        source = ASTSource(
            self.kernel,
            types | dict.fromkeys(constants, "constexpr"),
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        options = {"num_warps": num_warps, "maxnreg": maxnreg}
        if (key := (types, constants, aligned, options)) in self.known:
            return
        self.known.append(key)
        built = triton.compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=options)
        ir, ptx = built.asm["ttgir"], built.asm["ptx"]
        report = {
            "kernel": self.name,
            "constants": constants,
            "warps": num_warps,
            "shared_bytes": built.metadata.shared,
            "tensor_cores": "mma" in ptx or "tf32" in ptx,
            "overwritten": overwritten(ir),
            "unsafe": unsafe(ir, ptx, constants.get("STAGES", 1)),
            "loop": loop(machine_code(built.asm["cubin"])),
        }
        print(json.dumps(report | registers(ptx)))


def registers(ptx):
    """Registers to a thread, and bytes read back because they did not suffice."""
    from triton.knobs import nvidia

    program = nvidia.ptxas_blackwell if ARCHITECTURE >= 100 else nvidia.ptxas
    name = f"sm_{ARCHITECTURE}" + ("a" if ARCHITECTURE >= 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [program.path, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(told.split(" registers")[0].split()[-1]),
        "spilt_bytes": int(told.split(" bytes spill loads")[0].split()[-1]),
    }


def machine_code(cubin):
    """The instructions of a program, in the words of the card."""
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile("wb", suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        command = [nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)


def recurrences(size, all_of_them):
    import torch

    from retrograde.kernels import LARGEST_SIZE
    from retrograde.kernels.cells import Slopes
    from retrograde.kernels.cuda import (
        forward_kernels,
        limits,
        slope_kernels,
        step_kernels,
        sweep_kernels,
    )
    from retrograde.kernels.cuda import launch as cuda

    for module in (forward_kernels, sweep_kernels, slope_kernels, step_kernels):
        for name in LAUNCHED[module.__name__.rpartition(".")[2]]:
            setattr(module, name, Compiled(getattr(module, name), name))
    cuda._limit = lambda t: LIMITS[ARCHITECTURE]
    steps = torch.zeros(4, 2, size)
    for gates in (1, 3, 4):
        state = torch.zeros(2, size * (2 if gates == 4 else 1))
        gated = None if gates == 1 else steps
        slopes = Slopes(torch.zeros(4, 2, gates, size), gated, gated)
        kind = {1: "RNN_TANH", 3: "GRU", 4: "LSTM"}[gates]
        if size <= LARGEST_SIZE:
            sums, parts = torch.zeros(4, 2, gates * size), [torch.zeros(2, size) for _ in range(2)]
            bias, weights = torch.zeros(size), torch.zeros(gates * size, size)
            cuda.forward(kind, sums, weights, bias, parts[: 1 + (gates == 4)], steps)
        for dy in (steps, None) if all_of_them else (steps,):
            both = all_of_them or size == 20 or size > LARGEST_SIZE
            for tf32 in (True, False) if both else (False,):
                cuda._tf32 = lambda tf32=tf32: tf32
                weights = torch.zeros(gates * size, size)
                if size > LARGEST_SIZE:
                    for many in (1, 10**6):  # tiles of 32, and of 16
                        limits._MANY_TILES = many
                        cuda.sweep(slopes, weights, dy, state)
                else:
                    cuda.scan(slopes, weights, dy, state, 2)
                    cuda.sweep(slopes, weights, dy, state)
    cuda.gru_slopes(torch.zeros(4, 2, 3 * size), torch.zeros(4, 2, 3 * size), steps)
    cuda.lstm_slopes(torch.zeros(4, 2, 4 * size), steps, steps[0])


def sparse_products():
    import torch

    from retrograde.scan.sparse import cuda_products as cuda_sparse
    from retrograde.scan.sparse.factor import full, identity
    from retrograde.scan.sparse.pattern import Pattern

    cuda_sparse.sums = Compiled(cuda_sparse.sums, "sums")
    pattern = Pattern(identity(2), full(2, 2))
    for dtype in (torch.float32, torch.float64):
        for samples in (1, 2, 9, 32):
            values = torch.zeros(samples, pattern.nnz, dtype=dtype)
            cuda_sparse.multiply(pattern, pattern, values[0], values)
            cuda_sparse.apply(pattern, values, values[:, :4])


if __name__ == "__main__":
    everything = "--all" in sys.argv
    sparse_products() if sys.argv[2] == "sparse" else recurrences(int(sys.argv[2]), everything)
