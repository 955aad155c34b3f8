"""Small files replaced as a whole, where a full disk, a kill or a power cut leaves the old one or
the new one, and read as a whole, where nothing is waited for that stands in the place of one.
"""

import difflib
import errno
import os
import stat
import threading
from pathlib import Path

from open_instruct.core.errors import InputError

MAX_BYTES = 256 * 2**20
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def describe_special_file(path: Path) -> str:
    """The kind of a path that is no regular file, such as `a FIFO`; "" for a file, a link to one,
    or nothing.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link to nothing" if path.is_symlink() else ""
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "a device")


def read_whole(path: Path, *, most: int = MAX_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read, or is no file: a FIFO is not waited for, and a device, which may
            have no end, not read; or it has more than `most` bytes.
    """
    if kind := describe_special_file(path):
        raise OSError(errno.EINVAL, f"it is {kind}, where a file is needed", str(path))
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(
            errno.EINVAL,
            f"it has more than {most >> 20} MiB, more than a file of its kind needs",
            str(path),
        )
    return data


def read_user_file(name: str, *, where: str, most: int = MAX_BYTES) -> str:
    """The text of a file that a command was asked to read, which may be the end of a pipe.

    Raises:
        InputError: it is not there, cannot be read as UTF-8 text, or has more than `most`
            characters; `where` begins the message.
    """
    try:
        with (path := Path(name).expanduser()).open(encoding="utf-8") as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise OSError(
                errno.EFBIG,
                f"it has more than {most >> 20} MiB, more than a file of its kind needs",
            )
    except FileNotFoundError:
        raise InputError(
            f"{where}: no such file.{near_files(path) or ' Name one that is there.'}",
            kind="missing_file",
        ) from None
    # The last two of bytes that are no text, and of bad names.
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{where}: cannot be read as UTF-8 text: {why}", kind="unreadable_file"
        ) from None
    return text


def near_files(path: Path) -> str:
    """A sentence that names files with names near that of a missing one, with a space before it."""
    if not path.parent.is_dir():
        return f" There is no folder {path.parent} either."
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write beside `path`, and put it in place in one move; `durable` waits until the disk has it.

    Raises:
        OSError: it cannot be written; what was there is unharmed.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)  # unless it has been put in place
    if durable:
        sync_folder(path.parent)


def write_user_file(out: str | Path, text: str, *, flag: str) -> None:
    """Write the file that a command was asked for by `flag`.

    Raises:
        InputError: it cannot be written, or nothing can have that name.
    """
    try:
        path = Path(out).expanduser()
        if describe_special_file(path):
            path.write_text(text, encoding="utf-8")
        else:
            replace_text(path, text, durable=False)
    # The last two of names that no file can have.
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{flag} {out} cannot be written ({why}); name a file in a folder that exists",
            kind="unreadable_file",
        ) from None


def sync_folder(folder: Path) -> None:
    """A new name is on the disk only once its folder is; not every file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
