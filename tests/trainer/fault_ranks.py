"""The program that test_parallel.py starts as two ranks, of which one fails: `python -m tests.trainer.fault_ranks`."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from trainer.parallel.world import world


def main() -> None:
    leave = dist.destroy_process_group

    def together() -> None:
        """Stand in for leaving a process group of NCCL: a rank can only leave when all ranks do."""
        dist.barrier()
        leave()

    with mock.patch.object(dist, "destroy_process_group", together), world("cpu") as here:
        own = dist.new_group(backend="gloo")         # checkpoints have one, too
        here.sum(torch.ones(1))
        if here.rank == 1:
            raise OSError(5, "the disk is gone")
        dist.barrier(own)


if __name__ == "__main__":
    main()
