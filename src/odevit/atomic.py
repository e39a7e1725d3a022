"""Files that are there whole or not at all, whenever the process is killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

TEMPORARY = ".tmp-"  # how the names of unfinished files and folders begin


def sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(target: Path, content: str | bytes) -> None:
    """A reader, or a run after a crash, finds the old file or the new one, never half of it.

    What a killed write leaves has a fixed name beside the target: the next write of the same file takes its place.
    """
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    temporary.unlink(missing_ok=True)  # also a link, which is not followed
    try:
        # with the mode that the umask says
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(target.parent)


@contextmanager
def filled_folder(target: Path, last: str) -> Iterator[Path]:
    """A folder to fill; its files then move into `target`, `last` behind all others, without which it is not read.

    Other files in `target` stay: it may be somebody's repository.
    """
    target = Path(os.path.abspath(target))  # `.` has no name
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        try:
            yield temporary
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(f"could not write {target}: {error}. Free some space there, then try again") from error
        target.mkdir(exist_ok=True)
        (target / last).unlink(missing_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == last):
            sync(file)
            os.replace(file, target / file.name)
        sync(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
