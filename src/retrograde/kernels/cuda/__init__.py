"""The recurrence on a GPU, in Triton: kernels, and their launches by the limits of a card."""
