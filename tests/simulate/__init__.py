"""A simulated world: the product's driver in virtual time, on one thread, with faults from a seed.

    python -m tests.simulate --count 1000            histories 0 to 999
    python -m tests.simulate --seed 17               one history again, as a failure prints it

What is real: `Scheduler`, `TaskQueue`, `Progress`, `Log` and `LogView` with their SQLite databases, the steps of a plan
(`plan.drive.steps`) and what they find fresh (`plan.fresh`), `Store` and `Remote` with the retries of `store.retry`.
What is simulated:

* time and names (`clock`): nothing sleeps, a nonce comes from the seed
* object storage below `Remote` (`storage`): a request may time out before it had an effect, after it, or have its
  effect much later; a creation may be performed and refused; a listing may miss the newest objects; a disk may be full;
  a driver may be cut off for minutes; stored bytes may flip, those of the files of fresh nodes, too; packs of the log
  may be torn when they are stored, or lost
* workers (`backend`): they are slow, raise, run out of memory, die with their node, are given back, quarantine
  guilty and innocent rows; what they say comes twice, late, and in another order. Their files go to the same storage
* drivers (`world`): several on one store, one after the other and at the same time. At any call of clock, storage or
  backend one may be killed, and no cleanup of its has an effect; or it stands still, while the others go on and take
  the store over

A driver is a generator that the world resumes; while it waits or stands still, the others run above it on the same
stack. So one that waits goes on only when those above it wait or end, too: interleavings are last in, first out.

The auditor (`audit`) replays every segment by rules of its own as soon as it is written, and compares: one record a key
counts and never changes; a segment is never written twice, nor by anybody but the driver of its epoch, and goes only
when a sound pack holds it; who opens the log sees all of it, and fails if a segment is nowhere; every file of a
record is there with its bytes, unless a planned flip explains it; what `flush` returned for is durable; a verdict is
durable before its part goes on, and reaches every later attempt; a run ends with every task done once, or with an error
that a fault explains; its counts agree; it ends within bounded time once the faults have ended.

A fault has a name, `site#number:kind`. A history that fails is shrunk to fewer tasks and fewer faults (`history`), and
its message holds the command that runs it again at the same commit. `mutants` are bugs planted in the product to test
the simulator; each has to be found.

`preemption` is a world of its own, in which only nodes die: large runs on preempted nodes, and tasks that take their
nodes down. So is `test_queue`: servers, drivers and submitters on the queue of one store.

Not simulated: processes and their supervisors, crash triage inside a partition, publication of datasets, several
threads, a local disk with its hard links, tasks that make other content than before, stale reports of damage, a
holder on the same machine, the folder of the trainer's checkpoints.
"""
