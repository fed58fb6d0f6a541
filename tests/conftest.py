"""Settings for all tests: one thread (the networks are tiny), fixed seeds, unhurried hypothesis."""

import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background: what tests start is interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "suptickets", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("suptickets")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
