"""Takes documents out of a store: `tokenmill takedown`.

What a store holds of a document, and what a takedown does with it:

    objects/KEY/…               files of tasks: kept, dropped and quarantined documents, side tables, texts picked for a
                                tokenizer, encoded parts, assembled shards. A task with such a document has its record
                                withdrawn from the log, and its files removed. The next run does the task again
    datasets/ dropped/          parts with such a document are written again without it. Other parts stay as they are
    quarantine/
    .publish/                   the folders that were last replaced: removed
    shards/STREAM/split=…/      the document's tokens are overwritten by EOS, and are no targets. Sizes, boundaries and
                                order stay, so a training can continue (`takedown.shards`). Document tables name the
                                new rows of the parts (`takedown.lookup`). Lookup indexes: removed
    runs/RUN/curriculum.json    names the new shard sets, and which sets they replace
    runs/RUN/report.*           samples of the document are cut out, and the pages are made again (`takedown.reports`)
    report.json
    labels/DATASET/             labels of the document: removed
    nodes/ objects/lists/       removed; they hold ids at most, and each run writes them again

Nothing is removed from the log, which holds ids, counts and hashes, but no text and no URL.

A takedown holds the store's lease (the right to change the store), so no run is in progress meanwhile. Its steps:

1. `search.find` finds the documents: those with a listed id, URL or domain, and without `--only` also all documents
   that deduplication found similar to them. If only a kept document were removed, the next run would keep its dropped
   twin.
2. `takedowns/N.json` is written (`pipeline.store.tombstones`). From then on, runs refuse the store until the takedown
   is complete; later runs leave the documents out.
3. Reports, labels, published folders, shards, and at last the files of tasks are changed. Each step looks at what
   the store holds now, so after a crash the steps are simply done again (`takedown.complete`).
4. `takedowns/N.done.json` says what was removed, and which shard set replaced which.

To change a file, a takedown writes a new version, then the manifest that names it, and only then removes the old
version. A reader therefore finds either the whole old version or the whole new one.
"""
