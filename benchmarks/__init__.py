"""The project's own measurements: `python -m benchmarks [name...]`, or `make bench`.

Only ratios from one run count: contenders take turns, so that whatever else the machine does hits them alike.
"""

import os

# Threads that wait spin by default; on a machine that does something else too, they then hold up each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
