"""Ranges of remote files on disk: fetched once, at most so many bytes, never corrupt."""

import errno
import os
import shutil
import threading
from unittest import mock

import pytest

from nanochat.integrations import range_cache
from nanochat.integrations.range_cache import HASH_BYTES, RangeCache

SIZE = 1000  # of a range in these tests
ENTRY = SIZE + HASH_BYTES


class Server:
    """Counts what is fetched."""

    def __init__(self):
        self.fetched = []

    def __call__(self, name):
        def fetch():
            self.fetched.append(name)
            return name.encode() * (SIZE // len(name))

        return fetch


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def cache(tmp_path):
    return RangeCache(tmp_path / "cache", 10 * ENTRY)


def names_in(cache):
    return {path.name for path in cache.folder.iterdir() if not path.name.startswith(".")}


def set_age(cache, name, seconds):
    """Make a range one that was used some seconds ago."""
    path = cache.folder / name
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_a_range_is_fetched_once(cache, server):
    first = cache.read("a", server("a"))
    again = RangeCache(cache.folder, cache.limit).read("a", server("a"))
    assert first == again == b"a" * SIZE and server.fetched == ["a"]


def test_the_ranges_used_longest_ago_make_room(cache, server):
    for number in range(10):
        cache.read(str(number), server(str(number)))
        set_age(cache, str(number), seconds=100 - number)
    cache.read("0", server("0"))  # used now
    cache.read("x", server("x"))
    assert names_in(cache) == {"0", "x", *"3456789"}


def test_the_folder_stays_below_its_limit_with_several_processes(cache, server):
    """Each cache stands for one."""
    others = [cache, *(RangeCache(cache.folder, cache.limit) for _ in range(3))]
    for number in range(40):
        name = str(number)
        others[number % 4].read(name, server(name))
    sizes = [(cache.folder / name).stat().st_size for name in names_in(cache)]
    assert sum(sizes) <= cache.limit and len(sizes) >= 5


def test_the_folder_takes_half_of_a_small_disk(cache, server, monkeypatch):
    """Regression: it filled the disk, so that no checkpoint could be written."""
    disk = 8 * ENTRY
    usage = shutil.disk_usage(cache.folder.parent)

    def held():
        return sum((cache.folder / name).stat().st_size for name in names_in(cache))

    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=max(0, disk - held()))
    )
    for number in range(20):
        cache.read(str(number), server(str(number)))
        assert held() <= disk // 2
    assert held() >= disk * 3 // 8 and "19" in names_in(cache)


def test_a_full_disk_is_relieved(cache, server, monkeypatch):
    """Regression: once a disk was full, the folder kept all that it had, and checkpoints failed."""
    for number in range(8):
        cache.read(str(number), server(str(number)))
    usage = shutil.disk_usage(cache.folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
    cache.read("x", server("x"))
    assert names_in(cache) == {"5", "6", "7"}


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_a_corrupt_range_is_fetched_again_with_a_warning(cache, server, damage, caplog):
    good = cache.read("a", server("a"))
    path = cache.folder / "a"
    entry = bytearray(path.read_bytes())
    entry[50] ^= 1
    damaged = {"flipped": entry, "truncated": entry[:100], "empty": b""}
    path.write_bytes(damaged[damage])
    assert cache.read("a", server("a")) == good and server.fetched == ["a", "a"]
    assert "corrupt" in caplog.text


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, server, caplog):
    (tmp_path / "cache").touch()
    cache = RangeCache(tmp_path / "cache", 10 * ENTRY)
    for name in "abab":
        assert cache.read(name, server(name)) == name.encode() * SIZE
    assert len(caplog.records) == 1 and "fetched again" in caplog.text


def test_a_killed_process_leaves_nothing_for_long(cache, server):
    cache.read("a", server("a"))
    left = cache.folder / ".b.0123abcd.tmp"
    left.touch()
    os.utime(left, (1, 1))
    RangeCache(cache.folder, cache.limit).read("c", server("c"))
    assert not left.exists()


def test_two_threads_fetch_a_range_once(cache):
    began, may_end = threading.Event(), threading.Event()
    fetched = []

    def fetch():
        fetched.append(1)
        began.set()
        may_end.wait(60)
        return b"a"

    results = []
    threads = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.append(cache.read("a", fetch)))
        threads.append(thread)
        thread.start()
        began.wait(60)
    may_end.set()
    for thread in threads:
        thread.join()
    assert results == [b"a", b"a"] and fetched == [1]


def test_what_is_needed_next_is_fetched_first(cache, monkeypatch):
    monkeypatch.setattr(range_cache, "WORKERS", 1)
    may_begin, done = threading.Event(), threading.Event()
    order = []
    cache.do_soon("first", lambda: may_begin.wait(60), 0)
    for distance in (2, 0, 1):
        cache.do_soon(str(distance), lambda distance=distance: order.append(distance), distance)
    cache.do_soon("last", done.set, 9)
    may_begin.set()
    assert done.wait(60) and order == [0, 1, 2]


def test_an_error_of_a_job_stays_with_it(cache, monkeypatch):
    monkeypatch.setattr(range_cache, "WORKERS", 1)
    done = threading.Event()
    cache.do_soon("bad", lambda: 1 // 0, 0)
    cache.do_soon("good", done.set, 1)
    assert done.wait(60)
