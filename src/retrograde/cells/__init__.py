"""Any step function within a budget: ``unroll``, ``Recurrent``, ``bptt``."""
