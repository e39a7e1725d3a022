"""Files that open from disk and ask nothing of the network: their frame and their policy."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

DOCUMENT = Path(__file__).parent / "templates/document.html"


@dataclass(frozen=True)
class Opening:
    """What a report begins with: trusted HTML, its style and its script."""

    html: str
    css: str
    script: str


def document(kind: str, *, title: str, css: str, body: str, scripts: Sequence[str]) -> str:
    """A whole HTML file. kind: class of its body; title: text; css, body, scripts: trusted, as they stand."""
    return Template(DOCUMENT.read_text(encoding="utf-8")).substitute(
        kind=kind,
        policy=content_security_policy(scripts),
        title=escape(title),
        css=css,
        body=body,
        scripts="".join(f"<script>{script}</script>\n" for script in scripts),
    )


def content_security_policy(scripts: Iterable[str]) -> str:
    """The value of a Content-Security-Policy: no request leaves the file, and no script runs but these, by their hash.

    Workers and images may come from blobs that the page itself makes; figures carry style attributes.
    """
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:; "
        "base-uri 'none'; form-action 'none'"
    )
