"""Carry a schedule out: the core protocol, the executor, the autograd node, streaming.

The rules of exactness, which code and tests cite by number:

1. A cell that runs step by step gives the input and state gradients of ordinary autograd, bit for
   bit, on the same device. Fused ranges differ by the order of additions only.
2. A step's random numbers belong to the step, in whatever range it is run again.
3. A rerun leaves no trace. Generators and buffers are left as one ordinary pass leaves them.
4. Autocast is in a rerun what it was in the forward pass.
5. Every tensor that requires a gradient gets one, or an error names it: inputs, the initial state,
   parameters, and tensors that the cell captured.
6. What cannot be done exactly is refused before any work.
7. A budget is kept or refused, in the first call too. The refusal names the least budget.
8. Of equally cheap schedules a stated rule takes one, so the same call gives the same sums.
9. More memory is never slower, and a full budget runs the fastest way that is known.
10. Options can be combined, or the error names the pair and says what to do.
"""
