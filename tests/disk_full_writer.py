"""Run by test_disk_full in name spaces of its own: mounts a small file system in memory and writes until it is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import kvsnap
from kvsnap.errors import StorageError
from kvsnap.formats import native
from kvsnap.inspection import verify
from kvsnap.layout import Snapshot
from kvsnap.session import Session
from synthetic import same, snapshot

PAGE = 4096
NOT_PERMITTED = 77


def large(n: int) -> Snapshot:
    return snapshot(tuple(range(n)), heads=2, dim=32, vocab=4)


def free(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def leave(place: Path, filler: Path, pages: int) -> None:
    """Fill the file system up to these many free pages."""
    fd = os.open(filler, os.O_CREAT | os.O_WRONLY)
    more = free(place) - PAGE * pages
    if more > 0:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size + more)
    os.close(fd)


def run(place: Path) -> dict[str, int]:
    path, filler, saved = place / "a.kvsnap", place / "filler", place / "b.kvsnap"
    old, new = large(20), large(100)
    counts = {"appends": 0, "saves": 0, "fits": 0}
    for pages in range(20):
        for one in (path, filler, saved):
            one.unlink(missing_ok=True)
        kvsnap.save(old, saved)
        with Session.open(path) as session:
            session.append(old)
            for act, file, name in (
                (lambda s=session: s.append(new), path, "appends"),
                (lambda: kvsnap.save(new, saved), saved, "saves"),
            ):
                leave(place, filler, pages)
                before, room = file.read_bytes(), free(place)
                try:
                    act()
                    counts["fits"] += 1
                except StorageError as error:
                    known = (error.errno, file.read_bytes(), free(place))
                    assert known == (errno.ENOSPC, before, room), "what was begun is gone, and takes no room"
                    assert not same(native.load(file), old)
                    counts[name] += 1
                    os.truncate(filler, os.stat(filler).st_size // 4)
                    act()
                assert not same(native.load(file), new)
                assert verify(file).ok
        assert sorted(p.name for p in place.iterdir()) == ["a.kvsnap", "b.kvsnap", "filler"]
    return counts


if __name__ == "__main__":
    where = Path(sys.argv[1])
    mount = ["mount", "-t", "tmpfs", "-o", f"size={64 * PAGE}", "tmpfs", str(where)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        sys.exit(NOT_PERMITTED)
    counted = run(where)
    print(counted["appends"], counted["saves"], counted["fits"])
