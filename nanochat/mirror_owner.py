"""Which launch may write into a mirror: a record there, MIRROR/owner.json, which is only ever
replaced on condition that it has not changed since it was read.

    machine A   writes ... renews ... renews ... killed
    machine B                  reads, sees a renewal: refused
    machine C                                           reads, sees none for SILENCE_S: replaces it, and owns the run
    machine D                                           the same, but the record has changed: refused

The owner renews its record every RENEW_S. Another launch measures the silence with its own clock,
from the moment at which it read the record, so clocks of different machines are never compared. An
owner that ends gives the record back, and the next launch need not wait; nor need one in the same
run directory, whose lock proves that the owner has ended.

An owner that was suspended for longer than SILENCE_S finds the record of another launch when it
renews it next, which it also does before each mark that it writes. It ends with a sentence, and
writes nothing more into the mirror.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from nanochat.common import check_stop, parse_json, print0
from nanochat.mirror_store import Store, Versioned
from nanochat.run_state import PROCESS, identify

OWNER_NAME = "owner.json"
RENEW_S = 10.0
SILENCE_S = 60.0
POLL_S = 1.0
GIVE_BACK_S = 5.0  # how long the end of a launch waits for that
FORMAT_VERSION = 1

RECORD = {
    "format_version": int,
    "name": str,
    "launch": str,
    "since": str,
    "renewals": int,
    "released": bool,
    **PROCESS,
}


class Lease:
    """The right of one launch to write into a mirror, since it has written its record there.

    launch: names this launch. lost: '', or why it must end.
    """

    def __init__(self, store: Store, record: dict[str, Any], written: Versioned) -> None:
        self.launch: str = record["launch"]
        self.lost = ""
        self._store = store
        self._record = record
        self._written = written
        self._one_writer = threading.Lock()
        self._over = threading.Event()

    def renew(self, **changed: object) -> None:
        """Write the record again. ValueError if another launch owns the mirror by now; OSError if
        the mirror cannot be reached, and so cannot be owned by this launch for much longer."""
        with self._one_writer:
            if self.lost:
                raise ValueError(self.lost)
            record = {**self._record, "renewals": self._record["renewals"] + 1, **changed}
            written = self._store.swap(OWNER_NAME, encode(record), self._written)
            if written is None:
                self.lost = (
                    f"{self._store.where}: this launch no longer owns the mirror, because its record was removed or "
                    f"another launch took it over; exiting at once"
                )
                raise ValueError(self.lost)
            self._record = record
            self._written = written

    def keep(self) -> None:
        """Renew the record regularly, until it is given back or lost. Runs in a thread."""
        while not self._over.wait(RENEW_S):
            try:
                self.renew()
            except OSError:
                continue  # the copies that fail are reported
            except ValueError:
                return

    def give_back(self) -> None:
        """Let the next launch own the mirror without waiting. Takes at most GIVE_BACK_S."""
        self._over.set()
        writer = threading.Thread(target=self._give_back, name="mirror-last", daemon=True)
        writer.start()
        writer.join(GIVE_BACK_S)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.renew(released=True)


def encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode()


def read_owner(store: Store) -> tuple[Versioned | None, dict[str, Any]]:
    """(the record as it was read, its values); (None, {}) for a new mirror. ValueError if it is
    corrupt."""
    try:
        found = store.read(OWNER_NAME)
    except FileNotFoundError:
        return None, {}
    remedy = "if no launch owns this mirror, delete it there"
    record = parse_json(found.content, f"{store.where}: {OWNER_NAME}", RECORD, remedy=remedy)
    if record["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{store.where}: {OWNER_NAME}: format {record['format_version']}, this code reads {FORMAT_VERSION}; use "
            f"the code that wrote it"
        )
    return found, record


def claim_mirror(store: Store, name: str, before: Mapping[str, Any]) -> Lease:
    """Own a mirror. `name`: of the run. `before`: the process that owned the run directory last,
    which has ended, {} if there was none. ValueError if another launch owns the mirror. Stop if a
    stop is requested while it waits for a sign of life."""
    while True:
        found, record = read_owner(store)
        has_ended = record.get("released") or _is_same(record, before)
        if found is not None and not has_ended:
            _wait_for_silence(store, found, record)
        lease = _take(store, name, found)
        if lease is not None:
            store.check(OWNER_NAME)
            threading.Thread(target=lease.keep, name="mirror-owner", daemon=True).start()
            return lease


def _is_same(record: Mapping[str, Any], process: Mapping[str, Any]) -> bool:
    """Whether a record is of this process."""
    return bool(process) and all(record.get(key) == process.get(key) for key in PROCESS)


def _take(store: Store, name: str, found: Versioned | None) -> Lease | None:
    """Replace the record that was found; None if it has changed since then."""
    ours = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "launch": uuid.uuid4().hex,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "renewals": 0,
        "released": False,
        **identify(),
    }
    written = store.swap(OWNER_NAME, encode(ours), found)
    return None if written is None else Lease(store, ours, written)


def _wait_for_silence(store: Store, found: Versioned, record: Mapping[str, Any]) -> None:
    """Wait until the owner has given no sign of life for SILENCE_S. ValueError, which names it, as
    soon as it gives one."""
    print0(
        f"{store.where}: last owned by {_who(record)}; waiting up to {SILENCE_S:.0f} s for a sign of life"
    )
    end = time.monotonic() + SILENCE_S
    while time.monotonic() < end:
        check_stop()
        time.sleep(POLL_S)
        now, record = read_owner(store)
        if now is None or record["released"]:
            return
        if now.content != found.content:
            raise ValueError(
                f"{store.where}: another launch owns this mirror: {_who(record)}; end it, or name another place "
                f"for the mirror of this run"
            )


def _who(record: Mapping[str, Any]) -> str:
    return f"host {record['host']!a}, pid {record['pid']}, since {record['since']!a}"
