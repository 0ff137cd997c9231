"""Records training samples with high loss in OUT/worst_rows.jsonl. Whenever a line of progress is printed or a
checkpoint is written, the samples with the highest loss since the last such moment are appended.
`trainer.observe.worst_rows` describes the file and reads it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenizer.mixture.steps import TrainingStep
from trainer.base.files import appending
from trainer.observe.worst_rows import NAME, VERSION
from trainer.parallel.world import World


class HighLossRows:
    """Keeps the `most` rows (samples) of a training with the highest loss since rows were last written to the file.
    Rows are first kept on the device. They are copied to the host together with other numbers of the steps, so that
    training does not wait for them separately."""

    def __init__(self, out: Path, most: int, streams: list[str], world: World) -> None:
        self.path, self.most, self.streams, self.world = out / NAME, most, streams, world
        self.rows: Tensor | None = None              # [4, at most `most`] float64: loss, step, sample, stream
        self.on_host: list[tuple[float, ...]] = []

    def begin(self, step: int) -> None:
        """Record in the file that training continues after step `step`, for instance after a rewind (a return to a
        checkpoint). Readers of the file then ignore its earlier lines about steps after `step`."""
        self.write()
        self.rows = None
        self._append([{"event": "from", "step": step}])

    def add(self, step: TrainingStep, start: int, nll: Tensor, targets: Tensor, stream: Tensor) -> None:
        """Consider R rows (samples) that this rank has computed in a step, and keep those with the highest loss.
        `start` is the index of the first of these R rows among this rank's rows of the step. `nll` (summed loss),
        `targets` (number of targets that count) and `stream` (index) are [R]. Never waits for the device."""
        if not self.most:
            return
        places = start + torch.arange(len(nll), device=nll.device)
        samples = step.first + self.world.data_rank + self.world.data_size * places
        loss = (nll.double() / targets).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(targets == 0, -math.inf)
        rows = torch.stack((loss, torch.full_like(loss, step.number + 1), samples.double(), stream.double()))
        rows = rows if self.rows is None else torch.cat((self.rows, rows), 1)
        self.rows = rows[:, rows[0].topk(min(self.most, rows.shape[1])).indices]

    def packed(self) -> Tensor:
        """Return this rank's rows (samples with high loss) as a tensor on the device, float64 [data ranks · 4 · most],
        and remove them from this object. Each data rank fills a part of its own and leaves the others 0, so that the
        sum of all ranks' tensors has the rows of all ranks."""
        out = torch.zeros(self.world.data_size, 4, self.most, dtype=torch.float64, device=self.world.device)
        out[self.world.data_rank, 0] = -math.inf
        if self.rows is not None:
            out[self.world.data_rank, :, :self.rows.shape[1]] = self.rows
            self.rows = None
        return out.flatten()

    def unpack(self, values: list[float]) -> None:
        """Add the rows (samples with high loss) of all ranks to those on the host, and keep those with the highest
        loss. `values` is the result of `packed`, summed over ranks and copied to the host."""
        flat, most = values, self.most
        for rank in range(self.world.data_size if most else 0):
            losses, *numbers = (flat[(4 * rank + i) * most:(4 * rank + i + 1) * most] for i in range(4))
            self.on_host += [row for row in zip(losses, *numbers) if row[0] > -math.inf]
        self.on_host = sorted(self.on_host, key=order)[:most]

    def write(self) -> None:
        """Append the rows kept on the host (samples with high loss) to the file, and remove them from this object.
        Called whenever a line of progress is printed, and before a checkpoint."""
        self._append([{"step": int(step), "sample": int(sample), "stream": self.streams[int(stream)],
                       "loss": loss if math.isfinite(loss) else None}
                      for loss, step, sample, stream in self.on_host])
        self.on_host = []

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if self.world.first and self.most and lines:
            with appending(self.path) as f:
                f.writelines(json.dumps({"v": VERSION, **line}, ensure_ascii=False) + "\n" for line in lines)


def order(row: tuple[float, ...]) -> tuple[float, ...]:
    """Return the sort key of a row (loss, step, sample, stream): highest loss first, then step and sample. Rows are
    sorted by this key so that the file does not depend on the number or order of ranks."""
    return (-row[0], *row[1:])
