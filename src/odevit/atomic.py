"""Files that are there whole or not at all, whenever the process is killed."""

import os
import secrets
from pathlib import Path

TEMPORARY = ".tmp-"  # how the names of unfinished files and folders begin


def sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(target: Path, text: str) -> None:
    """A text file: a reader, or a run after a crash, finds the old one or the new one, never half of it."""
    temporary = target.with_name(f"{TEMPORARY}{target.name}-{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less what the umask takes away
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(target.parent)
