"""The command line of every script: flags, settings, flags from a file, and how a command begins
and ends.

    Parser               argparse without abbreviations, with defaults in --help and one-line errors
    --config=FILE        flags from a YAML, TOML or JSON file; a run's config.json is such a file
    setting(...)         a field of a dataclass of settings, from which nanochat/config.py makes a flag
    read_yaml(path)      a small YAML file
    run_main(main)       the last line of a script: exit codes, and one sentence for bad input

A file of flags becomes command-line arguments, placed before the user's own, which take precedence:

    depth: 12                                    --depth=12
    matrix-lr: 0.01                              --matrix-lr=0.01
    deterministic: false                         --no-deterministic

So a value from a file is converted and checked like any other flag.
"""

import argparse
import contextlib
import difflib
import errno
import faulthandler
import gc
import io
import json
import logging
import math
import os
import re
import select
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Flag, auto
from pathlib import Path
from typing import Any, TextIO

import yaml

from nanochat.common import (
    Stop,
    bars_hidden,
    get_dist_info,
    public,
    reason_of,
    refuse_secrets,
    visible,
)

EXIT_FAILED = 1  # exit code after an error that one sentence explains
EXIT_HALTED = 3  # the user must decide how the run continues
LEAVE_S = 5.0  # how long the end of a process may take after a part of it hung
_leaves_soon = False  # see `leave_soon`

MAX_BYTES = 1 << 19  # PyYAML takes five to ten seconds for this much
MAX_TOML_BYTES = 1 << 15  # tomllib takes two seconds for a key with this many dots
MAX_LEVELS = 20  # of nested lists and mappings
MAX_VALUES = 1 << 18  # in all of them together
TOO_DEEP = f"lists and mappings nested more than {MAX_LEVELS} deep"


# ---- settings -----------------------------------------------------------------------------------


class Decides(Flag):
    """What a setting decides about a run. A later launch may change only settings that decide
    nothing: those that say where, how fast and how long the run computes."""

    NOTHING = 0
    ROWS = auto()  # which tokens and targets are in each row; a receipt records these settings
    WEIGHTS = auto()  # the shape or the meaning of the weights, so other values cannot use them
    STEP = auto()  # anything else that a step computes, or where the run begins


# why a setting is fixed, unless it has a reason of its own
REASONS = {
    Decides.ROWS: "decides which tokens come in which order",
    Decides.WEIGHTS: "decides the shape of the model",
    Decides.STEP: "decides what a step computes",
}


def setting(
    default: object, help: str, *, decides: Decides = Decides.NOTHING, note: str = "", **more: Any
) -> Any:
    """Declare a field of a dataclass of settings. nanochat/config.py turns it into a flag, an entry
    of config.json and a rule for resuming. Declare a field there, or in the module that uses it.

    help: the text in --help. note: a sentence for readers, never compared with anything: why the
    setting is fixed, or what a change does, which a resume prints. Further keywords:

        flag=False                   the value follows from other settings or the machine, so it has no flag
        auto=True                    the default means "automatic": a resume keeps the run's value
        least, most                  smallest and largest allowed value; the default may lie outside
        above                        a value other than the default must be larger than this
        choices, metavar, type       as in argparse's add_argument
        also=["--other-name"]        additional names of the flag
    """
    rules = {"help": help, "decides": decides, "note": note or REASONS.get(decides, "")}
    return field(default=default, metadata={**rules, **more})


def check_bounds(flag: str, value: object, rules: Mapping[str, Any]) -> None:
    """ValueError if a number other than the default is out of the bounds in `rules`, the metadata
    of its setting."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{flag}: got {value}, expected a finite number")
    if "least" in rules:
        least = rules["least"]
        most = rules.get("most", value)
        if not least <= value <= most:
            and_most = f" and at most {most:,}" if "most" in rules else ""
            raise ValueError(f"{flag}: got {value}, expected at least {least}{and_most}")
    if "above" in rules and not value > rules["above"]:
        raise ValueError(f"{flag}: got {value}, expected a number above {rules['above']}")


# ---- flags --------------------------------------------------------------------------------------


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows every default except empty ones and those of switches."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        nothing = action.default in (None, "", argparse.SUPPRESS) or action.nargs == 0
        return text if nothing or "default" in text else f"{text} (default: %(default)s)".strip()


class _HelpAll(argparse.Action):
    """--help-all: the help with every flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        parser.everyday = ()
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """The command line of every script. Flags cannot be abbreviated; `-` and `_` are
    interchangeable. --help shows the defaults. An error is one line; for an unknown flag, it
    suggests a similar one."""

    everyday: Collection[str] = ()  # names of the flags that --help shows; () stands for all

    # what to say about an unknown flag, such as that of another program; '' for nothing in particular
    instead: Callable[[str], str] = staticmethod(lambda name: "")
    # (the name of a flag whose value brings further flags, what adds those of a value)
    brings: tuple[str, Callable[[str], None]] | None = None
    # selects the flags from a run's config.json, in a folder
    of_run: Callable[[dict[str, Any], Path], dict[str, Any]] = staticmethod(lambda flags, _: flags)
    # {flag: value} that a command line and its file stand for, before everything else
    inherits: Callable[[Sequence[str]], dict[str, Any]] | None = None
    example = ""  # an example of a --config file, shown in --help
    where = ""  # beginning of every error

    def __init__(self, **kwargs: Any):
        usual = {"prog": _command(), "allow_abbrev": False, "formatter_class": _Help}
        super().__init__(**{**usual, **kwargs})

    def show_first(self, everyday: Collection[str]) -> None:
        """Show only these flags in --help, and all in --help-all."""
        self.everyday = everyday
        self.add_argument("--help-all", action=_HelpAll, help="show every flag and exit")

    def format_help(self) -> str:
        """The text of --help."""
        hidden = [
            action
            for action in self._actions
            if self.everyday and action.dest not in (*self.everyday, "help", argparse.SUPPRESS)
        ]
        shown = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, help in zip(hidden, shown):
            action.help = help
        rest = sum(help != argparse.SUPPRESS for help in shown)
        return text + f"\n{rest} further flags: --help-all\n" * bool(rest)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like argparse, but report an unknown flag before a missing one, because it may be
        the missing one, misspelled. The parser of a subcommand checks its own flags. A URL that may
        hold a secret is refused before any message can show it."""
        given = [
            re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), word)
            for word in (sys.argv[1:] if args is None else args)
        ]
        for word in given:
            refuse_secrets(word)
        named = given
        if self._subparsers is None:
            given, named = self._with_file(given)
            for word in given:
                if re.match("--.", word):
                    self.known(word.partition("=")[0])
        parsed, rest = super().parse_known_args(given, namespace)
        if "config" in parsed:
            del parsed.config
        if self.inherits is not None:
            parsed.named = self._names_in(named)
        if rest and not rest[0].startswith("-") and "--model-tag" in self._option_string_actions:
            self.error(
                f"{rest[0]}: not a flag; name data with --data-path=PATH (several with commas between them), a run "
                f"with --model-tag=NAME, and its flags with --config=RUN/config.json"
            )
        for flag in ("--data-path", "--val-path"):
            value = value_of(named, flag)  # not an inherited one, which older code may have allowed
            if value is not None and not all(map(str.strip, value.split(","))):
                self.error(
                    f"{flag}: got {value!r:.80}, expected a path, or paths with commas between them; none may be blank"
                )
        return parsed, rest

    def _with_file(self, given: list[str]) -> tuple[list[str], list[str]]:
        """(command-line arguments, preceded by what they inherit and those of their --config file; the
        ones of them that name a setting). What is inherited names none, nor does a run's config.json,
        which has all settings."""
        path = value_of(given, "--config")
        values = {} if path is None else self._read_flags(path)
        # that of an imported run has nothing derived
        is_of_run = not {"derived", "tokenizer_fingerprint"}.isdisjoint(values)
        if is_of_run:
            values = self.of_run(values, Path(path or "").parent)
        inherited = self._inherited_by(values, given)
        if self.brings is not None:
            name, add = self.brings
            add(value_of(given, f"--{name}") or str(values.get(name, inherited.get(name))))
        in_file = [] if path is None else [*self._words_in(path, values), f"--config={path}"]
        named = given if is_of_run else [*in_file, *given]
        given = [*self._words_of(inherited), *in_file, *given]
        # added only now, so that a file cannot name another file
        if "--config" not in self._option_string_actions:
            self.add_argument(
                "--config",
                metavar="FILE",
                help=f"read this command's flags from a .yaml, .toml or "
                f".json file{self.example}; flags on the command line take precedence",
            )
        return given, named

    def _inherited_by(self, values: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
        """What a command line and the flags in its file inherit."""
        if self.inherits is None:
            return {}
        in_file = [f"{_flag(name)}={value}" for name, value in values.items() if value is not None]
        for word in in_file:
            refuse_secrets(word)
        return self.inherits([*in_file, *given])

    def _words_in(self, path: str, values: Mapping[str, Any]) -> list[str]:
        """The flags in a file as command-line arguments. Exits with one sentence that names it."""
        self.where = f"--config={path}: "
        words = self._words_of(values)
        self.where = ""
        return words

    def _names_in(self, words: Sequence[str]) -> list[str]:
        """The names of the settings that command-line arguments set."""
        flags = [word.partition("=")[0] for word in words]
        actions = [self._option_string_actions.get(flag) for flag in flags]
        return sorted({action.dest for action in actions if action is not None})

    def _read_flags(self, path: str) -> dict[str, Any]:
        """{flag: value} of a file of flags. Exits with one sentence if it cannot be read."""
        self.where = f"--config={path}: "
        try:
            if Path(path).suffix.lower() == ".toml":
                values: Any = tomllib.loads(_read_small(path, MAX_TOML_BYTES).decode())
                _check_plain(values)
            else:
                values = read_yaml(path)  # also JSON, which is YAML
        except OSError as e:
            self.error(f"{reason_of(e)}; expected a file of flags")
        except (ValueError, RecursionError) as e:
            self.error(f"{' '.join(str(e).split())[:150]}; expected YAML, or TOML in a .toml file")
        if not isinstance(values, dict):
            self.error(
                f"got {str(values)[:50]!r}, expected a mapping from flags to values, such as depth: 12"
            )
        self.where = ""
        return values

    def _words_of(self, values: Mapping[str, Any]) -> list[str]:
        """The flags of a file as command-line arguments. A null value switches off what is off by
        default, and counts as absent otherwise. Exits with one sentence for an unknown flag or a bad
        value."""
        known = self._option_string_actions
        words: list[str] = []
        for key, value in values.items():
            name = _flag(key)
            if value is not None:
                words += self._words_of_flag(name, value)
            elif is_off(self.known(name).default) and _off(name) in known:
                words.append(_off(name))
        for word in words:
            refuse_secrets(word)
        # parsed alone first, so that errors name the file; required flags may be on the command line
        required: list[Any] = [*self._actions, *self._mutually_exclusive_groups]
        required = [flags for flags in required if flags.required]
        for flags in required:
            flags.required = False
        super().parse_known_args(words)
        for flags in required:
            flags.required = True
        return words

    def _words_of_flag(self, name: str, value: object) -> list[str]:
        """A flag and its value in a file as command-line arguments."""
        action = self.known(name)
        is_switch = action.nargs == 0
        if isinstance(value, bool) != is_switch:
            expected = "true or false" if is_switch else "text or a number"
            self.error(f"{name}: got {value!r}, expected {expected}")
        if isinstance(value, int | float) and not is_switch and action.type in (None, Path):
            self.error(
                f"{name}: got the number {value}, expected text; put it in quotes, or 1.10 is 1.1"
            )
        if is_switch:
            name = name if value else _off(name)
            # a switch that is always off without its flag needs no argument
            return [name] if name in self._option_string_actions else []
        if isinstance(value, list) and action.nargs is not None:
            return [name, *map(str, value)]
        if isinstance(value, dict) or (isinstance(value, list) and dict in map(type, value)):
            value = json.dumps(value)
        elif isinstance(value, list):
            value = ",".join(map(str, value))
        return [f"{name}={value}"]

    def known(self, name: str) -> argparse.Action:
        """The action of a flag. Exits with one sentence if the flag is unknown."""
        known = self._option_string_actions
        if name not in known:
            hint = f"unknown flag{did_you_mean(name, known)}"
            takes_run = any(action.dest == "run" for action in self._get_positional_actions())
            if takes_run and name in ("--run", "--checkpoint", "--model-tag"):
                hint = f"pass the run's name without a flag: write d12 instead of {name}=d12"
            self.error(f"{name}: {self.instead(name) or hint}")
        return known[name]

    def error(self, message: str) -> Any:
        all_flags = "--help-all" if self.everyday else "--help"
        self.exit(2, visible(f"error: {self.where}{message} (all flags: {all_flags})\n"))


def _command() -> str | None:
    """How the present program was started: python -m scripts.base_train, nanochat train. None for a
    program that is not ours."""
    if sys.argv[0].startswith("nanochat "):
        return sys.argv[0]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_ours = spec is not None and spec.name.partition(".")[0] in ("scripts", "dev", "nanochat")
    return f"python -m {spec.name}" if spec is not None and is_ours else None


def _flag(name: object) -> str:
    """The flag of a setting."""
    return "--" + str(name).replace("_", "-")


def _off(flag: str) -> str:
    """The flag that switches off what a flag switches on."""
    return f"--no-{flag[2:]}"


def is_off(value: object) -> bool:
    """Whether a value switches off what a setting is about: None or False, but not 0."""
    return value is None or value is False


def value_of(given: Sequence[str], flag: str) -> str | None:
    """The value of a flag on a command line that is not parsed yet; None if it is absent."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, dest="value", nargs="?")
    return finder.parse_known_args([*given])[0].value


def whole(least: int, *, most: int | None = None, also: int | None = None) -> Callable[[str], int]:
    """The type of a flag: a whole number of at least `least` and at most `most`, or the special value
    `also`."""

    def number(text: str) -> int:
        """The value of a flag. ArgumentTypeError, from which argparse makes the error of the flag."""
        value = int(text)
        is_too_large = most is not None and value > most
        if (value < least or is_too_large) and value != also:
            limit = "" if most is None else f" and at most {most:,}"
            other = "" if also is None else f", or {also}"
            raise argparse.ArgumentTypeError(
                f"got {value}, expected at least {least}{limit}{other}"
            )
        return value

    number.__name__ = "int"  # argparse's error names the type
    return number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, or '' if none is
    similar. Of several that are equally similar, it is the first."""

    def similarity(other: str) -> float:
        return difflib.SequenceMatcher(None, other, name).ratio()

    closest = max(known, key=similarity, default="")
    is_similar = closest and similarity(closest) >= 0.7
    return f"; did you mean {closest}?" if is_similar else ""


# ---- small files that users write ---------------------------------------------------------------


def read_yaml(path: Path | str) -> Any:
    """The value in a YAML file. OSError if it cannot be read. ValueError, in one short sentence
    without the file's name, if it is too large or not YAML."""
    data = _read_small(path, MAX_BYTES)
    try:
        value = yaml.safe_load(data)
        _check_plain(value)
    except RecursionError:
        raise ValueError(f"not valid YAML ({TOO_DEEP})") from None
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        # of tags, too
        mark = getattr(e, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise ValueError(f"not valid YAML ({line}{problem[:120]})") from None
    return value


def _read_small(path: Path | str, max_bytes: int) -> bytes:
    """The bytes of a file. OSError if it cannot be read, ValueError if it has more than
    `max_bytes`."""
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes, the limit for such a file")
    return data


def _check_plain(value: object) -> None:
    """ValueError if a value of YAML or TOML is more than JSON can hold (a date, a set), holds half a
    surrogate pair, is nested more than MAX_LEVELS deep, or holds more than MAX_VALUES values, as
    aliases of YAML within aliases do in a few hundred bytes."""
    todo: list[tuple[object, int]] = [(value, 1)]
    seen = 0
    while todo:
        value, level = todo.pop()
        seen += 1
        if level > MAX_LEVELS:
            raise ValueError(TOO_DEEP)
        if seen > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        inner: list[Any] = []
        if isinstance(value, dict):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, list):
            inner = value
        elif isinstance(value, str):
            value.encode()  # fails for half a surrogate pair, which is not a character
        elif value is not None and not isinstance(value, int | float):
            raise ValueError(
                f"{value!s:.60} is a {type(value).__name__}, which is "
                f"not plain text or a number; put it in quotes"
            )
        todo += [(each, level + 1) for each in inner]


# ---- how a command begins and ends --------------------------------------------------------------


class _Aside(logging.StreamHandler):
    """Writes records to stderr, above the progress bar: warnings as `warning: ...`, information
    without a prefix."""

    def format(self, record: logging.LogRecord) -> str:
        text = visible(public(super().format(record)))
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        with bars_hidden():
            super().emit(record)


def setup_logging() -> None:
    """Send log records to stderr: warnings and errors from every rank, information from rank 0. A
    process killed by a signal (SIGBUS when a mapped file is truncated) also prints its stack
    traces. Scripts call this once."""
    faulthandler.enable(2)
    level = logging.INFO if get_dist_info()[1] == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[_Aside()])


class _LastingFile(io.FileIO):
    """A file whose reader may leave. What it can no longer take is dropped, so that no print ends a
    program whose real output is elsewhere."""

    def write(self, data: Any) -> int:
        """See `io.FileIO.write`. Returns the size of the data also if it was dropped."""
        try:
            # full, and another program set it not to wait
            while (written := super().write(data)) is None:
                select.select([], [self.fileno()], [])
            return written
        except OSError as e:
            # the reader or the terminal is gone: stop trying
            if e.errno in (errno.EPIPE, errno.EIO):
                discard(self.fileno())
            return len(data)


def discard(fd: int) -> None:
    """From now on, all that this process and its children write to a file descriptor is dropped."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside the context, a closed stdout or stderr (`| head`, a closed terminal) ends only that
    output."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_lasting, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO) -> TextIO:
    """A stream with a `_LastingFile` below it; one without a file descriptor, such as a test's
    buffer, as it is."""
    try:
        stream.flush()
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream
    below = io.BufferedWriter(_LastingFile(fd, "w", closefd=False))
    return io.TextIOWrapper(below, stream.encoding, stream.errors, line_buffering=True)


def quiet_gc() -> None:
    """Make Python's garbage collector run rarely: it ignores the objects that exist now, and runs
    only when there are 100,000 more. Call this before a loop that creates no reference cycles: the
    search for cycles took a tenth of the loader's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, like Ctrl-C, for work that may be interrupted at any
    point."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_main(main: Callable[[], int | None]) -> None:
    """Run a script and exit with the code that `main()` returns. The last line of every script
    calls this. Bad input (ValueError, OSError) becomes one sentence on stderr and exit code 1. The
    script exits quietly if the reader closes the pipe (as with `head`), and with one line after a
    stop or Ctrl-C, which may name a remedy. Any other exception is a bug and keeps its traceback."""
    global _leaves_soon
    _leaves_soon = False
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # closed (>&-): the next file that is opened would take its place, and receive what we
            # print
            discard(fd)
    # Python has none where the descriptor was closed
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escapes what the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by scripts/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout.fileno())  # with the output that is still buffered
        code = 128 + signal.SIGPIPE
    except (ValueError, OSError) as e:
        _say(f"error: {visible(public(str(e)))}")
        code = EXIT_FAILED
    except Stop as e:
        _say(f"stopped: {visible(public(str(e)))}")
        code = 0
    except KeyboardInterrupt as e:
        _say(": ".join(["interrupted", *map(str, e.args)]))
        code = 130
    except BaseException as e:  # a bug, or an exit of its own
        own_code = e.code if isinstance(e, SystemExit) else None
        _limit_the_end(own_code if isinstance(own_code, int) else EXIT_FAILED)
        raise
    _limit_the_end(code)
    sys.exit(code)


def leave_soon() -> None:
    """From now on, when `run_main` exits, what other programs have left in this process (threads,
    atexit functions) may take LEAVE_S at most. Call it if some part of the process hangs."""
    global _leaves_soon
    _leaves_soon = True


def _limit_the_end(code: int) -> None:
    """After `leave_soon`: end the process with this exit code, whatever still runs after LEAVE_S."""
    if _leaves_soon:
        last = threading.Timer(LEAVE_S, os._exit, [code])
        last.daemon = True
        last.start()


def _say(text: str) -> None:
    """Print to stderr, which may be closed."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
