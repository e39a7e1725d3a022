"""The figures of docs/RELIABILITY.md are those that `make torture` wrote, and they are what the page promises."""

import json

import dependencies
import reliability_tables

FIGURES = json.loads((reliability_tables.DOCS / "reliability.json").read_text())


def test_the_page_quotes_the_figures():
    text = (reliability_tables.DOCS / "RELIABILITY.md").read_text()
    assert reliability_tables.page(text, FIGURES) == text
    assert all(f"<!-- {part} -->\n" in text for part in FIGURES)


def test_what_the_page_promises():
    assert FIGURES["corruption"]["cases"] >= 10_000
    assert sum(row["kill"] + row["moment"] for row in FIGURES["kill"]["by_task"].values()) >= 100  # SIGKILL
    assert all(figures["bad"] == 0 for figures in FIGURES.values())
    ended = [row["seconds until both ended"] for row in FIGURES["ranks"]["by_task"].values()]
    assert max(ended) <= 60
    long = FIGURES["long"]
    assert long["minutes"] >= 115
    assert abs(long["in_use_mb_per_hour"][0]) < 1  # of 364 MB: nothing is kept that should go
    assert abs(long["handles_per_hour"]) < 0.1
    assert long["disk_mb_per_hour"] < 1


def test_the_dependencies_are_those_that_are_pinned():
    text = (reliability_tables.DOCS / "RELIABILITY.md").read_text()
    lines = (reliability_tables.DOCS.parent / "constraints.txt").read_text().lower().replace("_", "-").split()
    pins = dict(line.split("==") for line in lines if "==" in line)
    for package, (version, licence) in dependencies.everything().items():
        assert f"| {package} | " in text, f"{package}: run tests/reliability/reliability_tables.py"
        assert licence
        assert pins.get(package, version).split("+")[0] == version.split("+")[0]
