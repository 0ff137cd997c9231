"""Settings for all tests of the trainer: one thread per process, because several ranks on few cores would otherwise
slow each other down."""

from __future__ import annotations

import logging
import os

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"        # for the processes tests start
torch.set_num_threads(1)
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False     # else a line per tensor


@pytest.fixture
def forked_arms():
    """The trainings of studies of this process are forks of a process that has imported torch."""
    from tests.trainer.processes import forked_arms

    with forked_arms():
        yield


@pytest.fixture
def alone():
    """The World of a single process."""
    from trainer.parallel.world import world

    with world("cpu") as here:
        yield here
