"""A folder that this process may not enter, as another user's under umask 077. Tests may run as
root, who enters every folder with two capabilities, so these are put down meanwhile."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
ENTERS_ALL = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def private(folder: Path) -> Iterator[None]:
    """Nobody may enter `folder` inside the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)  # of this thread
    # effective, permitted and inheritable: the lower 32 of each, then the upper
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    without = (ctypes.c_uint32 * 6)(*before)
    without[0] &= ~ENTERS_ALL
    folder.chmod(0)
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
        folder.chmod(0o755)
