"""The figures of report.json about distributions, computed again by DuckDB over the published parts."""

from __future__ import annotations

import pytest

from pipeline.passes.tally import score_bin
from tests.e2e.report_site import Site


@pytest.fixture(scope="module")
def site(report_site) -> Site:
    return report_site


@pytest.mark.parametrize(("dataset", "signals"), [("clean", 25), ("extracted", 1), ("plain", 2), ("deduped", 0)])
def test_signals(site, dataset, signals):
    """Every signal of every step, over kept and dropped documents, and what each threshold tried lets pass."""
    section = site.report["signals"][dataset]
    everything = int(site.sql(f"select count(*) from (select id from {{kept:{dataset}}} union all select id from "
                              f"{{dropped:{dataset}}})")[0][0])
    assert section["read"] == {"docs": everything, "of": everything, "exact": True} and section["left_out"] == 0
    assert len(section["signals"]) == signals
    for row in section["signals"]:
        values = {word: [v for v, in site.sql(f"select signals.{row['signal']} from {{{word}:{dataset}}} "
                                              f"where signals.{row['signal']} is not null")]
                  for word in ("kept", "dropped")}
        assert (row["docs"], row["kept"]) == (len(values["kept"]) + len(values["dropped"]), len(values["kept"]))
        for word in ("kept", "dropped"):
            bins = [score_bin(v) for v in values[word]]
            assert row["bins"][word] == {str(b): bins.count(b) for b in sorted(set(bins))}
        for bound in row["bounds"]:
            for at in bound["at"]:
                sign = ">=" if bound["side"] == "min" else "<="
                test = f"signals.{row['signal']} {sign} {at['value']!r}::double"
                within = [int(site.sql(f"select count(*) from {{{word}:{dataset}}} where {test}")[0][0])
                          for word in ("kept", "dropped")]
                assert (at["docs"], at["kept"]) == (sum(within), within[0])
            assert bound["at"][[at["value"] for at in bound["at"]].index(bound["value"])]["kept"] == row["kept"]
