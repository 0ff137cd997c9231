"""One thread a test process: several ranks on few cores must not fight over them."""

from __future__ import annotations

import logging
import os

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"        # for the processes tests start
torch.set_num_threads(1)
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False     # a line for every tensor of a checkpoint


@pytest.fixture
def alone():
    """The world of a single process."""
    from trainer.parallel.world import world

    with world("cpu") as here:
        yield here
