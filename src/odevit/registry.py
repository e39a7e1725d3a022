"""A name → entry table that things register themselves in: solvers, losses, placements, teacher families, analyses."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """A dict that keeps the order of registration and refuses a second entry of the same name."""

    def __init__(self, kind: str, entries: Mapping[str, T] | None = None):
        super().__init__(entries or {})
        self.kind = kind

    def __setitem__(self, name: str, entry: T) -> None:
        if name in self:
            raise ValueError(f"there is a {self.kind} named {name!r} already; choose another name, or delete it first")
        super().__setitem__(name, entry)
