"""`tokenmill train verify RUN`: checks whether a checkpoint matches its run, and says which data the model has seen.

The checkpoint stores a hash over all samples that the training has read. The hash is computed again, from the
curriculum and the ledger (the list of skipped steps), and compared. Also checked are the sizes and sha256 of the
checkpoint's files, the tokenizer, and the shard sets (with `--shards` every byte of them).

`--against LIST` reports which documents of a list the model has seen by this step; LIST has one id per line, as
decontamination writes such lists. `--checkpoint` only reads the files of one checkpoint. The exit code is 1 if
something differs or a listed document was seen, else 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.base.visible import visible
from trainer.base.arguments import of_a_run, positive

if TYPE_CHECKING:
    from tokenizer.mixture.order import Order
    from tokenizer.shards.packed import PackedRows
    from tokenizer.shards.reader import ShardSet
    from trainer.checkpoint.checkpoints import Checkpoint
    from trainer.checkpoint.ledger import Ledger
    from trainer.loop.run import Run

#: number of seen documents that are named; further ones are only counted
NAMED = 20


def add_parser(commands: Any) -> None:
    verify = commands.add_parser("verify", parents=[of_a_run(optional=True)],
                                 description="Check a checkpoint against its run; say which data the model has seen.")
    verify.add_argument("--step", type=positive, metavar="N", help="the checkpoint of step N (default: the latest)")
    verify.add_argument("--shards", action="store_true", help="read every byte of the shards, too")
    verify.add_argument("--against", metavar="LIST",
                        help="a file with ids of documents, one a line: fail when the model has seen one of them")
    verify.add_argument("--checkpoint", nargs="?", const="", metavar="DIR|STEP",
                        help="only read every byte of one checkpoint (a folder, or a step of RUN; default: RUN's "
                             "latest) and name what is damaged")


def run(options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError
    from trainer.data.remote import reading
    from trainer.loop.run import open_run

    if options.checkpoint is not None:
        return check_checkpoint(options)
    if options.run is None:
        raise ConfigError("RUN is missing: give a run's folder, or --checkpoint DIR")
    opened = open_run(options.run, options.store, options.out, options.overrides)
    with reading(opened):
        return look(opened, options)


def check_checkpoint(options: argparse.Namespace) -> int:
    """Check every byte of the checkpoint given by --checkpoint against the recorded sha256, and print the names of
    damaged files. Returns the exit code."""
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.checkpoint.damage import damage

    marker = marked(options)
    attempt, sizes, sums = ckpt.commit(marker)
    lines = damage(ckpt.Checkpoint(attempt, {}, sizes, sums))
    print(f"{marker.parent}: {len(sizes)} files, {sum(sizes.values()):,} bytes, "
          + (f"{len(lines)} of them damaged" if lines else "every byte is what COMPLETE says"))
    for line in lines:
        print(f"  DAMAGED  {line}")
    return 1 if lines else 0


def marked(options: argparse.Namespace) -> Path:
    """Find the checkpoint given by --checkpoint. Returns its marker file, which lists the files of the checkpoint. The
    name of the marker is COMPLETE, or DAMAGED if a training has found the checkpoint damaged."""
    from trainer.base.config import ConfigError
    from trainer.checkpoint.checkpoints import ASIDE, STEP
    from trainer.loop.run import open_run

    address = options.checkpoint
    if address.isdecimal() or not address:
        if options.run is None:
            raise ConfigError(f"--checkpoint {address}: of which run? give its folder, or the checkpoint's")
        folder = open_run(options.run, options.store, options.out, options.overrides).out / "checkpoints"
        steps = [folder / f"step_{int(address):08d}"] if address else sorted(folder.glob(STEP))
    else:
        folder = Path(address)
        within = [folder, folder / "checkpoints", folder / "train" / "checkpoints"]
        steps = [folder.parent, folder, *sorted(p for top in within for p in top.glob(STEP))]
    markers = [p / name for p in steps for name in (ASIDE, "COMPLETE") if (p / name).is_file()]
    if not markers:
        raise ConfigError(f"{steps[0] if address.isdecimal() else folder}: no checkpoint there; give the training's "
                          f"--out, or a checkpoint's folder")
    return markers[-1]


def look(opened: Run, options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.checkpoint.ledger import Ledger

    sound, damaged = ckpt.survey(opened.out / "checkpoints")
    checkpoints, wrong_ones = {c.step: c for c in sound}, {d.step: d.why for d in damaged}
    if not checkpoints and not wrong_ones:
        raise ConfigError(f"{opened.out / 'checkpoints'}: no checkpoint there; give the training's --out")
    step = options.step or max([*checkpoints, *wrong_ones])
    if step in wrong_ones:
        raise ckpt.CheckpointError(f"{wrong_ones[step]}; `verify --checkpoint` reads the rest of it")
    if step not in checkpoints:
        raise ConfigError(f"--step {step}: there is no such checkpoint; there are {', '.join(map(str, checkpoints))}")
    ids = read_ids(Path(options.against)) if options.against else []  # raises errors now, not after an hour of reading
    checkpoint, ledger = checkpoints[step], Ledger.read(opened.out)
    meta = checkpoint.meta
    print(f"{checkpoint.folder.parent}: step {step:,}, {meta['samples']:,} samples, {meta['tokens']:,} tokens, phase "
          f"{meta.get('phase', 'unknown')}, written by {written_by(meta)}")
    wrong = 0
    for what, (problems, fine) in {
            "files": files(checkpoint), "tokenizer": tokenizer(opened, meta), "curriculum": curriculum(opened, meta),
            "data": data(opened, meta, ledger), "shards": shards(opened, options.shards)}.items():
        for line in problems or [fine]:
            print(visible(f"  {what:<11}{'DIFFERS' if problems else 'ok':<9}{line}"))
        wrong += len(problems)
    if meta["samples"] <= opened.curriculum.samples:
        print(visible("\n".join(["seen", *words(opened, step, ledger)])))
    if options.against:
        hits = against(opened, meta["samples"], ledger, ids)
        seen_hits = [h for h in hits if h.steps]
        print(f"against {options.against}: {len(ids):,} ids, {len({h.id for h in hits}):,} of them in the shards, "
              f"{len({h.id for h in seen_hits}):,} seen")
        for hit in seen_hits[:NAMED]:
            print(f"  SEEN {hit.id} (stream {hit.stream}) in step{'s' if len(hit.steps) > 1 else ''} "
                  + ", ".join(map(str, hit.steps[:5])) + (", …" if len(hit.steps) > 5 else ""))
        if len(seen_hits) > NAMED:
            print(f"  and {len(seen_hits) - NAMED:,} more")
        wrong += len(seen_hits)
    return 1 if wrong else 0


def written_by(meta: dict[str, Any]) -> str:
    from trainer.loop.run import version

    code = meta.get("code")
    return f"trainer {version(code) if code else 'unknown'}, torch {meta.get('torch')}, {meta.get('device', '?')}, " \
           f"{meta['world']} rank{'s' if meta['world'] > 1 else ''}"


def files(checkpoint: Checkpoint) -> tuple[list[str], str]:
    """Check the files of a checkpoint against their recorded sha256. (Their sizes were checked when the checkpoint was
    found.) Returns (lines about differences, a line to print if there are none)."""
    from trainer.checkpoint.checkpoints import sha256

    try:
        wrong = [f"{name}: sha256 is not what COMPLETE says: damaged or replaced" for name, expected in
                 sorted(checkpoint.sha256.items()) if sha256(checkpoint.folder / name) != expected]
        present = [p for p in checkpoint.folder.iterdir() if p.is_file()]
    except FileNotFoundError as error:
        return [f"{error.filename}: gone meanwhile; a training that is running deletes what checkpoint.keep does not "
                f"keep: verify a later one"], ""
    wrong += [f"{p.name}: COMPLETE does not name it" for p in present if p.name not in checkpoint.sha256]
    return wrong, f"{len(present)}, {sum(p.stat().st_size for p in present):,} bytes, sha256 of all"


def tokenizer(run: Run, meta: dict[str, Any]) -> tuple[list[str], str]:
    from trainer.data.remote import place, sha256

    store, top = place(run)
    path = f"{top}/{run.curriculum.tokenizer.path}"
    expected = meta["curriculum"]["tokenizer"]["sha256"]
    if run.curriculum.tokenizer.sha256 != expected:
        return [f"the curriculum names {run.curriculum.tokenizer.sha256[:16]}…, the checkpoint {expected[:16]}…"], ""
    try:
        actual = sha256(store, path)
    except FileNotFoundError:
        return [f"{path}: no such file"], ""
    if actual != expected:
        return [f"{path}: sha256 is {actual[:16]}…, not {expected[:16]}…"], ""
    return [], f"{expected[:16]}…"


def curriculum(run: Run, meta: dict[str, Any]) -> tuple[list[str], str]:
    """Check that the run's curriculum.json still gives the samples that were read before the checkpoint was written.
    `meta` is the checkpoint's metadata. Settings of the training are not checked. Returns (lines about differences, a
    line to print if there are none)."""
    from trainer.loop.run import differences

    wrong = [line for line in differences(meta, run) if not line.startswith(("train.", "schedule:"))]
    return wrong, f"seed {run.curriculum.seed}, order {run.curriculum.order[:16]}…"


def data(run: Run, meta: dict[str, Any], ledger: Ledger) -> tuple[list[str], str]:
    """Check which data a checkpoint was trained on: compute the hash over the samples of all steps that were not
    skipped, and compare it with the hash in `meta`, the checkpoint's metadata. Returns (lines about differences, a line
    to print if there are none)."""
    from itertools import takewhile

    from tokenizer.mixture.order import Order
    from trainer.data.provenance import chain

    if not ledger.sound(meta):
        return ["the ledger says that this checkpoint was given up by a rewind"], ""
    if meta["samples"] > run.curriculum.samples:
        return [f"the curriculum ends at sample {run.curriculum.samples:,}"], ""
    steps = takewhile(lambda step: step.number < meta["step"], run.steps())
    now = chain(Order(run.curriculum), steps, passed=ledger.why).hex()
    if now != meta["chain"]:
        return [f"the hash chain is {meta['chain']}, curriculum and ledger make {now}: the model has seen other data, "
                f"or in another order"], ""
    return [], f"hash chain {now} of {meta['step'] - sum(b - a for a, b, _ in passed(ledger, meta['step'])):,} steps"


def shards(run: Run, deep: bool) -> tuple[list[str], str]:
    from tokenizer.shards.layout import ShardError
    from tokenizer.shards.verify import verify
    from trainer.data.remote import damaged, shard_set

    wrong, count = [], 0
    for stream in run.curriculum.streams:
        try:
            pinned = shard_set(run, stream)
            count += len(pinned.manifest.shards)
            if deep:
                lines = damaged(pinned) if run.source else verify(run.store / stream.train, stream.sha256)
                wrong += [f"{stream.name}: {line}" for line in lines]
        except ShardError as error:
            wrong.append(str(error))
    return wrong, f"{len(run.curriculum.streams)} pinned sets, {count} shards" + \
        (", every byte" if deep else " (--shards reads them)")


# -- data that the model has seen ------------------------------------------------------------------------------------
def passed(ledger: Ledger, step: int) -> list[tuple[int, int, str]]:
    """Return which of the steps up to `step` were skipped, and why, as disjoint ranges (first, stop, reason), in order;
    `stop` is exclusive."""
    result: list[tuple[int, int, str]] = []
    for first, stop, why in sorted(ledger.passed):
        first, stop = max(first, result[-1][1] if result else 1), min(stop, step + 1)
        if first < stop:
            result.append((first, stop, why))
    return result


def words(run: Run, step: int, ledger: Ledger) -> Iterator[str]:
    """Yield lines to print about the data that was read in the first `step` steps: tokens and epochs of each stream
    (data source), and which steps were skipped."""
    from tokenizer.mixture.order import Order

    order, phases = Order(run.curriculum), run.curriculum.phases
    samples = run.sample_at(step)
    tokens = np.zeros(len(order.names), np.int64)
    for p, phase in enumerate(phases):
        samples_read = min(max(samples - phase.start, 0), phase.samples)
        tokens += np.array(order.apportioned[p].counts(samples_read)) * phase.sequence
    ranges = passed(ledger, step)
    for first, stop, _ in ranges:
        at = order.locate(run.sample_at(first - 1), run.sample_at(stop - 1))
        np.subtract.at(tokens, at.stream, at.sequence)
    for stream, count in zip(run.curriculum.streams, tokens.tolist()):
        yield f"  {stream.name:<20}{count:>18,} tokens{count / max(1, stream.tokens):>9.3f} epochs"
    for first, stop, why in ranges:
        yield f"  not seen: steps {first:,} to {stop - 1:,} were skipped ({why})"


@dataclass(frozen=True)
class FoundDocument:
    """A document of the given list that is in the training shards. `stream` is the data source that has it; `steps` are
    the steps that read parts of it (empty if none has)."""

    id: str
    stream: str
    steps: tuple[int, ...]


def read_ids(path: Path) -> list[str]:
    """Read document ids from a file, the first word of each line. Lines that begin with # are skipped. Returns the ids
    sorted and without duplicates. Raises ConfigError when the file cannot be read."""
    from trainer.base.config import ConfigError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--against {path}: cannot be read ({error.strerror})") from None
    return sorted({line.split()[0] for line in lines if line.strip() and not line.startswith("#")})


def against(run: Run, samples: int, ledger: Ledger, ids: Sequence[str]) -> list[FoundDocument]:
    """Look for the documents with the ids `ids` in the training shards. Returns a FoundDocument for each one found. Its
    `steps` are those that read a part of the document before sample number `samples`, without skipped steps."""
    from tokenizer.mixture.order import Order
    from trainer.data.remote import shard_set

    order = Order(run.curriculum)
    hits = []
    for s, stream in enumerate(run.curriculum.streams):
        shards = shard_set(run, stream)
        for name, begin, end in spans(shards, ids):
            numbers = readers(order, s, begin, end, shards.packed)
            steps = sorted({run.step_of(n) for n in numbers[numbers < samples].tolist()})
            hits.append(FoundDocument(name, stream.name, tuple(n for n in steps if ledger.why(n) is None)))
    return hits


def spans(shards: ShardSet, ids: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (id, first token, exclusive end) for each document of `ids` that the shards hold. The two positions count
    tokens from the start of the stream (data source), over all shards."""
    import pyarrow as pa
    import pyarrow.compute as pc

    listed = pa.array(ids, pa.string())
    for shard, offset in enumerate(shards.offsets[:-1]):
        begin = offset
        with shards.table(shard) as table:
            for batch in table.iter_batches(columns=["end", "id"]):
                ends = batch.column("end").to_numpy().astype(np.int64) + offset
                for i in np.flatnonzero(pc.is_in(batch.column("id"), value_set=listed).to_numpy(zero_copy_only=False)):
                    yield batch.column("id")[i].as_py(), int(ends[i - 1]) if i else begin, int(ends[i])
                begin = int(ends[-1]) if len(ends) else begin


def readers(order: Order, stream: int, begin: int, end: int, packed: PackedRows | None = None) -> np.ndarray:
    """Return the numbers (int64) of all samples of the curriculum that read the document at tokens [begin, end) of a
    stream (data source). `packed` are the packed rows by which the stream is read; None means that it is read by
    windows.

    A sample whose last token is the first token of the document does not count. The last token of a sample is only a
    target, and the first token of a document does not count in the loss.
    """
    if packed is not None:
        rows = packed.rows_with(begin, end)
        located = order.samples_of(stream, int(rows[0]), int(rows[-1]) + 1) if len(rows) else {}
        return np.concatenate([np.empty(0, np.int64), *(numbers[np.isin(windows, rows)]
                                                        for numbers, windows, _ in located.values())])
    last = min((end - 1) // order.longest + 1, order.supers[stream])
    result = [np.empty(0, np.int64)]
    for phase, (numbers, windows, _) in order.samples_of(stream, begin // order.longest, last).items():
        length = order.curriculum.phases[phase].sequence
        result.append(numbers[(windows * length < end) & ((windows + 1) * length > begin)])
    return np.concatenate(result)
