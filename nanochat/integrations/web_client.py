"""The HTTP client of data on the Hub and on web servers: requests that are repeated, redirects that
lose no token, and waits that a stop ends.

    get(path, address, headers)     an answer: 2xx, or one that no retry would change
      ask                           one attempt, with redirects
      pause                         before the next one: 0.2 s, 0.4 s, ..., or what Retry-After says

**Redirects** are followed here, not by urllib3: a token goes to the server that it is for, and to
no other one. The address at which a redirect ends is used for the next ranges of the same file,
which saves a round trip, until it refuses one: such addresses are signed for an hour or so.

**Waiting.** A request that fails for a temporary reason (no connection, a truncated answer, 408,
429, 5xx) is repeated after a growing pause, or after the time in the answer's Retry-After: for 600
s, but for only 30 s if the server has never answered. It runs in a daemon thread, while the caller
checks ten times a second whether the program should stop (`poll`).

**Secrets.** The addresses at which redirects end may be signed, so messages name a host, never an
address, and show no text of the HTTP library.

Rejected: requests, which takes twice the processor time (6.6 ms instead of 3.2 for a range behind a
redirect, with its thread and its file): it looks for ~/.netrc and certificates with each request.
Only its knowledge of proxies is used.
"""

import email.utils
import functools
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import urllib3
from requests import utils

from nanochat.common import check_stop

log = logging.getLogger(__name__)

CONNECTIONS = 64  # kept open to each server
HOPS = 5  # redirects of one request
MOVED_S = 600.0  # how long the address at which a redirect ended is used


@dataclass(frozen=True)
class Patience:
    """Timeouts, and the time between two warnings, in seconds."""

    connect_s: float = 5.0
    silence_s: float = 15.0  # until the next byte of an answer
    first_answer_s: float = 30.0  # how long to retry until the server first answers
    give_up_s: float = 600.0  # how long to retry after that
    first_pause_s: float = 0.2  # between two attempts; each later pause is twice as long
    log_every_s: float = 15.0


PATIENCE = Patience()


class NoAnswer(Exception):
    """No usable answer to a request, of which a retry may get one."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(problem)
        self.host = host
        self.problem = problem


class Key(NamedTuple):
    """A secret that only one server may see."""

    origin: str = ""  # scheme://host:port
    token: str = ""

    def __repr__(self) -> str:
        return f"Key({self.origin})"


NO_KEY = Key()


class Answer(NamedTuple):
    """An answer that is not a redirect."""

    status: int
    headers: Mapping[str, str]  # upper and lower case are the same
    body: bytes
    host: str  # that sent it
    address: str  # that it came from, which may be signed, so it is never shown
    first: Mapping[str, str]  # headers of the first server's answer, which may have been a redirect


# ---- requests ------------------------------------------------------------------------------------

ANSWERED: set[str] = set()  # hosts that have answered
_last_warning = [-math.inf]  # time of the last warning about a wait
moved: dict[str, tuple[str, float]] = {}  # {address: (where its redirect ended, when)}


@functools.cache
def connections_to(origin: str) -> urllib3.PoolManager:
    """The connections of this process to a server, by the proxy that the environment names, if
    any."""
    proxy = utils.select_proxy(origin, utils.get_environ_proxies(origin))
    own_authorities = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    options: dict[str, Any] = {
        "maxsize": CONNECTIONS,
        "cert_reqs": "CERT_REQUIRED",
        "ca_certs": own_authorities or utils.DEFAULT_CA_BUNDLE_PATH,
    }
    if not proxy:
        return urllib3.PoolManager(**options)
    login = ":".join(filter(None, utils.get_auth_from_url(proxy)))
    headers = urllib3.util.make_headers(proxy_basic_auth=login or None)
    return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)


def _forget_parent() -> None:
    """Open new connections in a forked process: those of its parent carry the parent's answers."""
    connections_to.cache_clear()


os.register_at_fork(after_in_child=_forget_parent)


def origin_of(address: str) -> str:
    """scheme://host:port of an address."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"


def host_of(address: str) -> str:
    """The host and port of an address, for messages."""
    return urlsplit(address).netloc.rpartition("@")[2]


def ask(address: str, headers: Mapping[str, str], key: Key, most: int) -> Answer:
    """The answer to a GET request, after redirects. A body of more than `most` bytes is not read.
    NoAnswer if there is none."""
    first: Mapping[str, str] | None = None
    for _ in range(HOPS):
        answer, body = _ask_once(address, headers, key, most)
        first = answer.headers if first is None else first
        target = answer.get_redirect_location()
        if not target:
            return Answer(answer.status, answer.headers, body, host_of(address), address, first)
        target = urljoin(address, target)
        if address.startswith("https:") and not target.startswith("https:"):
            raise NoAnswer(host_of(address), "it redirects to an address that is not https")
        address = target
    raise NoAnswer(host_of(address), f"it redirects more than {HOPS} times")


def _ask_once(
    address: str, headers: Mapping[str, str], key: Key, most: int
) -> tuple[urllib3.BaseHTTPResponse, bytes]:
    """(answer, body) of one request, without redirects; see `ask`."""
    origin = origin_of(address)
    signed = dict(headers)
    if key.token and origin == key.origin:
        signed["Authorization"] = f"Bearer {key.token}"
    try:
        answer = connections_to(origin).request(
            "GET",
            address,
            headers=signed,
            timeout=urllib3.Timeout(connect=PATIENCE.connect_s, read=PATIENCE.silence_s),
            redirect=False,
            retries=False,
            preload_content=False,
        )
        body = answer.read(most + 1)
    except (urllib3.exceptions.HTTPError, OSError) as e:
        raise NoAnswer(host_of(address), type(e).__name__) from None  # its text may show a secret
    if len(body) <= most:
        answer.release_conn()
        return answer, body
    answer.close()  # the rest of the body would be in the way of the next answer
    return answer, b""


def retry_after(answer: Answer) -> float:
    """The seconds for which a server asks to wait; 0 if it does not. The Hub says in RateLimit when
    its limit starts over, as in "resolvers";r=0;t=55."""
    limit = re.search(r";\s*t=(\d{1,6})\b", answer.headers.get("RateLimit", ""))
    if answer.status == 429 and limit:
        return float(limit[1])
    value = answer.headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,6}", value):
        return float(value)
    when = email.utils.parsedate_tz(value)
    return 0.0 if when is None else max(0.0, email.utils.mktime_tz(when) - time.time())


def is_temporary(status: int) -> bool:
    """Whether a request may succeed later."""
    return status in (408, 425, 429) or status >= 500


def get(
    path: str, address: str, headers: Mapping[str, str], *, key: Key = NO_KEY, most: int
) -> Answer:
    """The answer to a GET request, which is repeated if that may help. `path` names it in messages.
    OSError if there is no answer."""
    began = time.monotonic()
    pause_s = PATIENCE.first_pause_s
    has_warned = False
    while True:
        asked_s = 0.0
        try:
            answer = _ask_where_it_moved(address, headers, key, most)
            ANSWERED.update((host_of(address), answer.host))
            if not is_temporary(answer.status):
                if has_warned:
                    waited_s = time.monotonic() - began
                    log.warning("%s answers again, after %.0f s", answer.host, waited_s)
                return answer
            host = answer.host
            problem = f"HTTP {answer.status}"
            asked_s = retry_after(answer)
        except NoAnswer as e:
            host = e.host
            problem = e.problem
        patience_s = PATIENCE.give_up_s if host in ANSWERED else PATIENCE.first_answer_s
        wait_s = max(pause_s, asked_s)
        waited_s = time.monotonic() - began
        if waited_s + wait_s > patience_s:
            is_hub = path.startswith("hf://") and host == host_of(address)
            setting = " and HF_ENDPOINT" if is_hub else ""
            raise OSError(
                f"{path}: nothing from {host} for {waited_s:.0f} s ({problem}); check the network{setting}, then "
                f"give the same command again"
            )
        if waited_s + wait_s > 1:
            has_warned |= _warn_of_wait(
                f"{path}: nothing from {host} ({problem}); next attempt in {wait_s:.1f} s"
            )
        pause(wait_s)
        pause_s *= 2


def pause(seconds: float) -> None:
    """Wait, unless a stop is requested."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        check_stop()
        time.sleep(min(left_s, 0.1))


def _ask_where_it_moved(address: str, headers: Mapping[str, str], key: Key, most: int) -> Answer:
    """`ask` at the address at which an earlier redirect ended, if it is recent and still answers."""
    target, when = moved.pop(address, ("", -math.inf))
    if time.monotonic() - when < MOVED_S:
        answer = ask(target, headers, key, most)
        if answer.status == 206:
            moved[address] = (target, when)
            return answer
    answer = ask(address, headers, key, most)
    if answer.address != address and answer.status == 206:
        moved[address] = (answer.address, time.monotonic())
    return answer


def _warn_of_wait(sentence: str) -> bool:
    """Warn about a request that waits, from time to time, once for all of them. Whether it did."""
    now = time.monotonic()
    is_due = now - _last_warning[0] > PATIENCE.log_every_s
    if is_due:
        _last_warning[0] = now
        log.warning("%s", sentence)
    return is_due
