"""The figures of docs/RELIABILITY.md are those that `make torture` wrote, and they are what the page promises."""

import json

import reliability_tables

FIGURES = json.loads((reliability_tables.DOCS / "reliability.json").read_text())


def test_the_page_quotes_the_figures():
    text = (reliability_tables.DOCS / "RELIABILITY.md").read_text()
    assert reliability_tables.page(text, FIGURES) == text
    assert all(f"<!-- {part} -->\n" in text for part in FIGURES)


def test_what_the_page_promises():
    assert FIGURES["corruption"]["cases"] >= 10_000
    assert FIGURES["kill"]["faults"] >= 100
    assert all(figures["bad"] == 0 for figures in FIGURES.values())
    assert FIGURES["corruption"]["unnoticed"] == 0
    ended = [row["seconds until both ended"] for row in FIGURES["ranks"]["by_task"].values()]
    assert max(ended) <= 60
