"""Files of caches, which are used only if no other user could have written them.

Libraries and kernels in a cache are code. A digest beside a file does not protect it, since whoever
writes the one writes the other. So the owner and the mode of each folder and file are checked.
"""

import contextlib
import functools
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("coop-plan")

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFileError(OSError):
    """A file or folder that another user could have written; `path` is the one to blame."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}, so another user could have written in it")
        self.path = path


class CacheFolderError(OSError):
    """A cache folder cannot be used: it cannot be created, or others can write in it."""

    def __init__(self, folder: Path, cause: OSError) -> None:
        remedy = ""
        if isinstance(cause, UntrustedFileError) and folder.is_relative_to(cache_dir()):
            remedy = "; set XDG_CACHE_HOME to a folder of your own"
        super().__init__(f"{reason_of(cause)}{remedy}")
        self.folder = folder


def cache_dir() -> Path:
    """Folder of caches: `coop-plan` in `$XDG_CACHE_HOME`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "coop-plan"


def shared_dir() -> Path | None:
    """The folder of `COOP_SHARED_CACHE`, if it is set: root's, from which code is read first."""
    named = os.environ.get("COOP_SHARED_CACHE")
    return Path(named).absolute() if named else None


def private_folder(folder: Path, mode: int = 0o700) -> Path:
    """The folder, created with its parents if needed, in which no other user can write.

    A folder of this user's in which others can write is closed to them. Files that they wrote
    there before are found by `check_trusted`.

    Raises:
        CacheFolderError: it cannot be created or trusted.
    """
    try:
        for each in reversed((folder, *folder.parents)):
            with contextlib.suppress(FileExistsError):
                if not each.exists():
                    each.mkdir(mode & ~OTHERS_WRITE)
        found = folder.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{folder} is no folder")
        if found.st_mode & OTHERS_WRITE and found.st_uid == _user():
            folder.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)
        check_trusted(folder)
    except OSError as error:
        raise CacheFolderError(folder, error) from error
    return folder


def private_file(path: Path) -> None:
    """Create the file of a cache in its folder if needed, in which no other user can write.

    Raises:
        CacheFolderError, OSError: it cannot be created.
        UntrustedFileError: another user could have written it.
    """
    private_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    check_trusted(path)


def check_trusted(path: Path, *, root_only: bool = False) -> None:
    """Raise an error if another user could have written a file or what lies in a folder.

    The file and its folder belong to this user or root (with `root_only`, to root), and nobody else
    can write there. No folder above lets others replace one that lies in it.

    Raises:
        UntrustedFileError: as said.
        FileNotFoundError: there is no such file.
    """
    if fcntl is None:  # no owners as in POSIX
        return
    real = path.resolve(strict=True)
    _check_owner(real, root_only=root_only)
    if not real.is_dir():
        _check_owner(real.parent, root_only=root_only)
    given = path.absolute()  # with its links, which `resolve` follows
    for each in {*given.parents, *real.parents, given}:
        found = each.lstat()
        if found.st_uid not in _owners_above():
            raise UntrustedFileError(each, f"belongs to user {found.st_uid}")
        free = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if free and stat.S_ISDIR(found.st_mode):
            raise UntrustedFileError(each, "can be written by all users, without a sticky bit")


def _check_owner(path: Path, *, root_only: bool) -> None:
    found = path.stat()
    if found.st_uid not in ({0} if root_only else {0, _user()}):
        raise UntrustedFileError(path, f"belongs to user {found.st_uid}")
    if found.st_mode & OTHERS_WRITE:
        raise UntrustedFileError(path, f"has mode {stat.S_IMODE(found.st_mode):o}")


def _user() -> int:
    return os.geteuid()


@functools.cache
def _owners_above() -> frozenset[int]:
    """Users that may own the folders above a cache.

    In a user namespace without root, as of Apptainer, the system's folders show another owner.
    """
    owners = {0, _user()}
    with contextlib.suppress(OSError, ValueError):
        mapped = Path("/proc/self/uid_map").read_text().splitlines()
        if not any(line.split()[0] == "0" for line in mapped):
            owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(owners)


@contextlib.contextmanager
def file_lock(path: Path, seconds: float, waiting: str) -> Iterator[None]:
    """Hold an exclusive lock on a file among the processes of this machine.

    The wait is told once, by `waiting`. After `seconds`, and where no lock can be had, the body
    runs without it. The end of a process ends its lock.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        _take(file, seconds, waiting)
        yield
    finally:
        with contextlib.suppress(OSError):
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have the file open as well
        os.close(file)


def _take(file: int, seconds: float, waiting: str) -> None:
    if fcntl is None:
        return
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):  # a file system without locks
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    return
                _log_once(waiting)
                time.sleep(0.05)
            else:
                return


@functools.cache
def _log_once(message: str) -> None:
    log.warning(message)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """A new file beside `path`, which it replaces at the end of the block, if that is whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def continue_without(cache: Path, error: Exception) -> None:
    """Log once that a cache is not used, and why."""
    if isinstance(error, CacheFolderError):
        cache = error.folder
    _log_once(f"continuing without the cache {cache}: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """Text of an error, without the random names of temporary files."""
    return getattr(error, "strerror", None) or str(error)
