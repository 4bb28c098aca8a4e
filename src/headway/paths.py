"""Where everything lies: one class names every file of a job."""

import contextlib
import itertools
import os
import stat
from pathlib import Path
from urllib.parse import quote, unquote
from zlib import crc32

from headway.errors import InputError, PlatformError

JOURNAL = ".hwj"
NODE = ".hwn"
PULSE = ".hwp"
NETWORK = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "beegfs", "afs", "glusterfs", "9p", "fuse"]
)
"""File systems on which a mapped file may be on another machine."""


class JobPaths:
    """The files of one job below a home or a spool folder."""

    def __init__(self, home: Path, job: str) -> None:
        if not job:
            raise InputError("a job needs a name: it is empty. Give one with HEADWAY_JOB=NAME.")
        self.job = job
        self.folder = home / "jobs" / folder_name(job)
        self.journals = self.folder / "journals"
        """One file a process, written in place where the home is node-local."""
        self.nodes = self.folder / "nodes"
        """One file a collector, where it is not."""
        self.collector_lock = self.folder / "collector.lock"
        self.attempts = self.folder / "attempts"
        """How many attempts supervisors have counted, less one."""

    def make(self) -> "JobPaths":
        """Creates the folders, readable by this user only."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.journals, self.nodes):
            folder.mkdir(mode=0o700, exist_ok=True)
        return self

    def journal(self, process: str) -> Path:
        """The journal of one process."""
        return self.journals / (folder_name(process) + JOURNAL)

    def node(self, collector: str) -> Path:
        """What one collector brought together."""
        return self.nodes / (folder_name(collector) + NODE)

    def pulse(self, collector: str) -> Path:
        """Which of its processes one collector last saw alive, and how far they were."""
        return self.nodes / (folder_name(collector) + PULSE)


def jobs_in(home: Path) -> list[str]:
    """The names of all jobs, the one that was last active first."""
    folder = home / "jobs"
    found = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    return [unquote(entry.name) for entry in sorted(found, key=_last_change, reverse=True)]


def folder_name(text: str) -> str:
    """A file name for any text: no separators, no hidden or relative names, not longer than file systems allow."""
    name = quote(text, safe=" @+=,", errors="replace")
    if name.startswith("."):
        name = "%2E" + name[1:]
    return name if len(name) <= 200 else f"{name[:180]}-{crc32(text.encode('utf-8', 'replace')):08x}"


def private_folder(folder: Path) -> Path:
    """The folder, made if need be; PlatformError if anyone but this user could write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PlatformError(
            f"{folder} belongs to somebody else or can be written by others: a journal there could be forged. "
            f"Remove it, or name another folder with HEADWAY_SPOOL."
        )
    return folder


_ESCAPED = ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\"))
"""How the kernel writes characters in its list of mounts that would confuse its readers."""


def is_network(folder: Path, mountinfo: str | None = None) -> bool:
    """Whether the folder lies on a network file system, where mapped files are neither safe nor coherent."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    target = os.path.realpath(folder)
    best, kind = "", ""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4]
        for code, character in _ESCAPED:
            mount = mount.replace(code, character)
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind.partition(".")[0] in NETWORK


def _last_change(folder: Path) -> float:
    """When a job last wrote: by its newest files, since one that runs for days makes none."""
    newest = 0.0
    for part in (folder / "journals", folder / "nodes"):
        with contextlib.suppress(OSError), os.scandir(part) as entries:
            newest = max([newest, *(entry.stat().st_mtime for entry in itertools.islice(entries, 4096))])
    return newest or folder.stat().st_mtime
