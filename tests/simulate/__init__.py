"""Simulates drivers of a store in virtual time, on one thread, with random faults from a seed. A history is one
simulated sequence of events.

    python -m tests.simulate --count 1000            histories 0 to 999
    python -m tests.simulate --seed 17               one history again, as a failure prints it

What is real: `Scheduler`, `TaskQueue`, `Progress`, `Log` and `LogView` with their SQLite databases, the steps of a plan
(`plan.drive.steps`) and what they find fresh (`plan.fresh`), `Store` and `Remote` with the retries of `store.retry`.
What is simulated:

* time and names (`clock`): nothing really sleeps, and random names come from the seed
* object storage below `Remote` (`storage`): a request may time out before or after it takes effect, or take effect
  much later; a creation may be performed and yet be reported as refused; a listing may miss the newest objects; a disk
  may be full; a driver may be cut off for minutes; bits of stored files may flip; packs of the log may be cut short or
  lost
* workers (`backend`): they are slow, raise errors, run out of memory, die with their node, are given back, and
  quarantine rows, rightly or wrongly. Their reports come late, twice, and in another order. Their files go to the same
  storage
* drivers (`world`): several on one store, one after the other and at the same time. At any call of clock, storage or
  backend, a driver may be killed (its cleanup then has no effect), or stand still while others take the store over

A driver is a generator that the world resumes. While a driver waits or stands still, the others run above it on the
same stack. A waiting driver can therefore only go on when those above it wait or have ended: not every interleaving
occurs.

The auditor (`audit`) replays every segment of the log by its own rules as soon as it is written, and checks that:

* one record per key counts, and it never changes
* a segment is written once, by the driver of its epoch, and is only removed when a sound pack holds it
* whoever opens the log sees all of it, and gets an error if a segment is missing everywhere
* every file of a record exists with the right bytes, unless a planned flip explains the difference
* everything is durable that was appended before `flush` returned
* the quarantine of a row is durable before its task goes on, and every later attempt learns of it
* a run ends with every task done once and correct counts, or with an error that a fault explains
* a run ends within bounded time once no more faults happen

A fault has a name, `site#number:kind`. A history that fails is shrunk to fewer tasks and fewer faults (`history`), and
the message has the command that runs it again at the same commit. `mutants` are bugs planted in the product to test the
simulator, which has to find each of them.

`preemption` is a separate simulation, in which only nodes die: large runs on preempted nodes, and tasks that take their
nodes down. So is `test_queue`: servers, drivers and submitters on the queue of one store.

Not simulated are: processes and their supervisors, crash triage inside a partition, publication of datasets, several
threads, a local disk with hard links, tasks whose result changes, outdated reports of damage, a holder of the lease on
the same machine, and the folder of the trainer's checkpoints.
"""
