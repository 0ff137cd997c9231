"""`tokenmill takedown`: removes documents from a store, for good."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage
from pipeline.cli.options import JsonOpt, StoreOpt, TakeoverOpt, open_store

if TYPE_CHECKING:
    from pipeline.store.fs import Store
    from pipeline.store.tombstones import Takedown, Tombstones
    from pipeline.takedown.search import Matches

#: entries without a match that are named
NAMED = 5


def register(app: typer.Typer) -> None:
    app.command("takedown")(takedown)


def takedown(store: StoreOpt,
             ids: Annotated[Path | None, typer.Option("--ids", metavar="FILE", help="Ids, one per line.")] = None,
             urls: Annotated[Path | None, typer.Option("--urls", metavar="FILE", help="URLs, one per line.")] = None,
             domains: Annotated[Path | None, typer.Option(
                 "--domains", metavar="FILE", help="Domains, one per line; each covers its subdomains.")] = None,
             reason: Annotated[str | None, typer.Option(
                 "--reason", metavar="TEXT", help="Why; it is kept in the store, so name no person.")] = None,
             only: Annotated[bool, typer.Option(
                 "--only", help="Remove only these documents, and keep their near-duplicates.")] = False,
             dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
             complete: Annotated[bool, typer.Option("--complete", help="Complete an interrupted takedown.")] = False,
             takeover: TakeoverOpt = False, json_lines: JsonOpt = False) -> None:
    """Remove documents from a store, and keep every later run from bringing them back.

    The documents, and near-duplicates of them that deduplication found, are removed from datasets, dropped and
    quarantined documents, task files, labels and reports. In shards, the tokens of the documents are overwritten by
    EOS, so that a training can continue. The next run of a recipe writes shards without these documents, with which a
    training must begin anew. If the command was interrupted, run it again: it completes the takedown.

    \b
    Examples:
      tokenmill takedown --urls urls.txt --reason "request 17" --dry-run --store corpus
      tokenmill takedown --domains domains.txt --reason "robots.txt" --store corpus
    """
    from pipeline.store.log import Log
    from pipeline.takedown.shards import seen
    from pipeline.takedown.takedown import begin, carry_out, survey
    from pipeline.takedown.takedown import complete as complete_all

    at = open_store(store)
    if complete and (ids or urls or domains or dry_run):
        raise BadUsage("--complete takes no list; leave out the other options")
    wanted, names = (None, {}) if complete else _wanted(ids, urls, domains)
    if wanted is not None and dry_run:
        matches, holds = survey(at, Log.read(at), wanted, only)
        _show(at, json_lines, matches, {**holds, "seen": seen(at, frozenset(matches.ids))}, names, "would be removed")
        return
    reason = (reason or "").strip()
    if wanted is not None and not reason:
        raise BadUsage("give a --reason, which is kept in the store")
    with Log.open(at, run="takedown", takeover=takeover) as log:
        completed = complete_all(at, log)
        if complete and not completed:
            typer.echo("no takedown was interrupted", err=True)
        for earlier in completed:
            typer.echo(f"takedown {earlier.number}, which was interrupted, is complete", err=True)
            _show_outside(at, earlier.holds.get("outside", ()), err=True)
            if wanted is not None and _same(earlier, wanted):
                wanted = None                     # the interrupted command was given again
        if wanted is not None:
            begun, matches = begin(at, log, wanted, reason, only)
            done = carry_out(at, log, begun)
            _show(at, json_lines, matches, {**begun.holds, **done, "seen": begun.seen}, names, "were removed")
            if not json_lines:
                typer.echo(f"{at.at(begun.path)} and {Path(begun.done_path).name} list what was removed; finish "
                           f"trainings that read these shards before you run their recipes again", err=True)


def _wanted(ids: Path | None, urls: Path | None, domains: Path | None) -> tuple[Tombstones, dict[str, str]]:
    """Read the user's lists of ids, URLs and domains of documents to remove. Returns the tombstones (entries by which
    later runs leave documents out), and a map from each tombstone to the line of the list that it was made from."""
    from pipeline.base.domain import ascii_domain, domain_of
    from pipeline.store.tombstones import Tombstones, url_hash

    if not (ids or urls or domains):
        raise BadUsage("give a list: --ids, --urls or --domains FILE")
    listed_ids, listed_urls = (_lines(path, option) if path else [] for path, option in ((ids, "--ids"),
                                                                                         (urls, "--urls")))
    hosts = [line.lower().rstrip(".") for line in _lines(domains, "--domains")] if domains else []
    for url in listed_urls:
        if not domain_of(url):
            raise BadUsage(f"--urls {urls}: '{visible(url)}' is no URL; give it whole, as in https://example.org/page")
    for host in hosts:
        if host.startswith("www."):              # no URL keeps its "www.", so this entry would match nothing
            raise BadUsage(f"--domains {domains}: '{visible(host)}': 'www.' cannot be taken out alone; give "
                           f"{visible(host.removeprefix('www.'))}, which covers all its subdomains")
        if domain_of(f"http://{host}") != host or "." not in host:
            raise BadUsage(f"--domains {domains}: '{visible(host)}' is no domain; give it without scheme and path, as "
                           f"in example.org")
    hosts = [ascii_domain(host) for host in hosts]
    names = {**{id: id for id in listed_ids}, **{url_hash(url): url for url in listed_urls}, **{h: h for h in hosts}}
    return Tombstones(frozenset(listed_ids), frozenset(map(url_hash, listed_urls)), frozenset(hosts)), names


def _lines(path: Path, option: str) -> list[str]:
    """Return the lines of a user's list of ids, URLs or domains, without empty ones. Raises BadUsage for a file that
    cannot be read, is empty, or has a line of several words."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except OSError as e:
        raise BadUsage(f"{option} {path}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise BadUsage(f"{option} {path}: is not UTF-8 text; give one entry a line") from None
    if not (lines := [line for line in lines if line]):
        raise BadUsage(f"{option} {path}: is empty; give one entry a line")
    if odd := next((line for line in lines if len(line.split()) > 1), None):
        raise BadUsage(f"{option} {path}: '{visible(odd[:80])}' is more than one word; give one entry a line")
    return lines


def _same(takedown: Takedown, wanted: Tombstones) -> bool:
    return (set(takedown.ids), set(takedown.urls), set(takedown.domains)) == (wanted.ids, wanted.urls, wanted.domains)


def _show_outside(store: Store, outside: Iterable[dict[str, Any]], err: bool = False) -> None:
    """Print which folders outside the store may still hold documents that were removed, and what to do about each
    folder."""
    from pipeline.store.copies import Copy

    for copy in (Copy(**one) for one in outside):
        host = f" (on {copy.host})" if copy.host else ""
        typer.echo(visible(f"outside the store, and not changed: {copy.place}{host}, {copy.kind} of {copy.of}; "
                           f"{copy.remedy(store)}"), err=err)


def _show(store: Store, json_lines: bool, matches: Matches, facts: dict[str, Any], names: dict[str, str],
          what: str) -> None:
    unmatched = sorted(name for entry, name in names.items() if entry not in matches.matched)
    if json_lines:
        typer.echo(json.dumps({**facts, "documents": sorted(matches.ids), "twins": sorted(matches.twins),
                               "unverified": sorted(matches.unverified), "unmatched": unmatched}))
        return
    typer.echo(f"{len(matches.ids):,} documents {what}, {len(matches.twins):,} of them as near-duplicates: results of "
               f"{len(facts['records']):,} tasks, {len(facts['parts']):,} published parts, {len(facts['labels']):,} "
               f"labels")
    for one in facts["shards"]:
        change = f", now {one['new'][:12]}" if "new" in one else ""
        typer.echo(f"{one['folder']}: {one['documents']:,} documents in set {one.get('sha256', one.get('old'))[:12]}"
                   f"{change}")
    for one in facts.get("seen", ()):
        typer.echo(f"run {one['run']} reads {one['documents']:,} of them in {one['samples']:,} samples of stream "
                   f"{one['stream']}; checkpoints after the first: {', '.join(one['checkpoints']) or 'none here'}")
    _show_outside(store, facts["outside"])
    if unmatched:
        more = f" and {len(unmatched) - NAMED:,} more" if len(unmatched) > NAMED else ""
        typer.echo(f"no document matches {', '.join(map(visible, unmatched[:NAMED]))}{more}", err=True)
    if matches.unverified:
        typer.echo(f"{len(matches.unverified):,} documents share a cluster with them, but are not known to be similar; "
                   f"they stay", err=True)
