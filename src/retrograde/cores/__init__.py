"""What a range of steps can be: a cell, or recurrent layers by several kernels."""
