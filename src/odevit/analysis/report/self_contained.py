"""Files that open from disk and ask nothing of the network: their policy."""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Opening:
    """What a report begins with: trusted HTML, its style and its script."""

    html: str
    css: str
    script: str


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
