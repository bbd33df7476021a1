"""Two workers share the machine's cores, so each computes with one thread (spinning threads of
several workers would wait for one another)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
