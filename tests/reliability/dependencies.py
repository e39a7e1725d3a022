"""What odevit stands on: every package that it requires, with the version that is installed and its licence.

python tests/reliability/dependencies.py
"""

import importlib.metadata
import re


def required(name: str, extras: tuple[str, ...] = ()) -> list[str]:
    """Names of the packages that a package requires, with those of some of its extras."""
    found = []
    for line in importlib.metadata.requires(name) or []:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        if extra is None or extra[1] in extras:
            found.append(re.match(r"[\w.-]+", requirement.strip())[0])  # type: ignore[index]
    return found


def licence(name: str) -> str:
    """As the package's metadata says: an SPDX expression, a classifier, or the first line of its text."""
    meta = importlib.metadata.metadata(name)
    classifiers = [c.rsplit(" :: ", 1)[-1] for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    said = meta.get("License-Expression") or ", ".join(classifiers) or (meta.get("License") or "not told")
    return said.strip().splitlines()[0][:60]


def everything(root: str = "odevit", extras: tuple[str, ...] = ("train", "dev")) -> dict[str, tuple[str, str]]:
    """name → (version, licence) of all that is installed below `root`."""
    found: dict[str, tuple[str, str]] = {}
    waiting = required(root, extras)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found or name == root:
            continue
        try:
            found[name] = importlib.metadata.version(name), licence(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or not needed
        waiting += required(name)
    return dict(sorted(found.items()))


def table() -> str:
    rows = [f"| {package} | {version} | {terms} |" for package, (version, terms) in everything().items()]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
