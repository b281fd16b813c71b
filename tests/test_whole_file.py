"""Files that appear whole, and what a killed process leaves: its temporary files and reservations are cleared, those of running ones stay."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from magi2_core import packages
from magi2_core.errors import OutputError
from magi2_core.whole_file import Reservation, clear_left_over, whole_file

posix = pytest.mark.skipif(os.name != "posix", reason="the system has no such locks: nothing is cleared")

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import packages
del sys.path[0]
packages.register()
from pathlib import Path
from magi2_core.whole_file import Reservation, whole_file

folder = Path(sys.argv[2])
assert Reservation(folder / ".clip_0001.taken").take()
with whole_file(folder / "clip.mp4") as temporary:
    temporary.write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen]:
    """Another process in the middle of a file, with a reservation."""
    line = [sys.executable, "-c", HOLDER, str(packages.ROOT / "magi2_core"), str(folder)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_file_replaces_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "clip.mp4"
    with whole_file(target) as temporary:
        temporary.write_bytes(b"one")
        assert not target.exists()
    with pytest.raises(ZeroDivisionError), whole_file(target) as temporary:
        temporary.write_bytes(b"two")
        raise ZeroDivisionError
    assert target.read_bytes() == b"one" and names(target.parent) == ["clip.mp4"]


def test_whole_file_system_errors_name_the_target(tmp_path: Path) -> None:
    expected = r"clip\.mp4 could not be written: No space left on device\. Buy a disk\."
    with pytest.raises(OutputError, match=expected), whole_file(tmp_path / "clip.mp4", remedy="Buy a disk."):
        raise OSError(28, "No space left on device")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="could not be written"), whole_file(tmp_path / "file" / "clip.mp4"):
        raise AssertionError("the block must not run")
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_whole_file_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for name, options in (("a", {}), ("b", {"mode": 0o600})):
            with whole_file(tmp_path / name, **options) as temporary:
                temporary.write_bytes(b"x")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o640, 0o600]


@posix
def test_left_over_of_a_killed_process_is_cleared_and_of_a_running_one_kept(tmp_path: Path) -> None:
    foreign = [".clip.mp4.part", "clip_0001.taken", ".other.0123abcd.part", ".note.0123abcd.magi2-part.txt"]
    for name in foreign:
        (tmp_path / name).touch()
    with holder(tmp_path) as process:
        clear_left_over(tmp_path)
        assert len(names(tmp_path)) == len(foreign) + 2
        assert not Reservation(tmp_path / ".clip_0001.taken").take()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(names(tmp_path)) == len(foreign) + 2
    clear_left_over(tmp_path)
    assert names(tmp_path) == sorted(foreign)


def take_in_turn(folder: Path) -> Reservation:
    """Two reservations of one name: the second has it when the first has let go. Returns the first."""
    own, other = (Reservation(folder / ".clip_0001.taken") for _ in range(2))
    assert own.take() and not other.take()
    clear_left_over(folder)
    assert names(folder) == [".clip_0001.taken"]
    own.release()
    assert other.take()
    other.release()
    return own


@posix
def test_reservation_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    with holder(tmp_path):
        pass
    take_in_turn(tmp_path).release()
    assert names(tmp_path) == []


def test_reservation_without_locks_is_the_file_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magi2_core.whole_file._lock", lambda descriptor: None)
    take_in_turn(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_whole_file_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="is no name for a file"), whole_file(tmp_path / name):
        raise AssertionError("nothing can be written")
