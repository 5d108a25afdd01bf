"""The command line of all scripts: flags, errors of one line, small YAML files, and how a command
ends."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.cli import Parser, read_yaml, whole
from nanochat.common import as_path, get_base_dir
from tests.spec.test_common import HOSTILE, SHOWN

ROOT = Path(__file__).parents[2]


def parser():
    p = Parser(prog="tool")
    p.instead = {"--resume-from-step": "use --resume=PATH"}.get
    p.add_argument("--input-dir", help="folder of text")
    p.add_argument("--depth", type=whole(2, also=-1), default=20, help="layers")
    p.add_argument("--fast", action="store_true", help="skip checks")
    p.add_argument("--text", required=True)
    return p


def commands():
    p = Parser(prog="tool")
    p.add_subparsers(dest="command").add_parser("rows").add_argument("--text", required=True)
    return p


def test_underscores_are_dashes_and_help_shows_defaults_that_are_not_empty():
    args = parser().parse_args(["--input_dir=a_b", "--depth", "4", "--text=x_y"])
    assert (args.input_dir, args.depth, args.text) == ("a_b", 4, "x_y")
    assert commands().parse_args(["rows", "--text=--x_y"]).text == "--x_y"
    text = " ".join(parser().format_help().split())
    assert (
        "layers (default: 20)" in text
        and "folder of text (" not in text
        and "skip checks (" not in text
    )


def test_a_file_of_flags_need_not_hold_the_required_ones(tmp_path, capsys):
    (tmp_path / "flags.yaml").write_text("fast: true\n")
    p = parser()
    either = p.add_mutually_exclusive_group(required=True)
    either.add_argument("--name")
    either.add_argument("--number", type=int)
    given = ["--text=x", f"--config={tmp_path / 'flags.yaml'}"]
    args = p.parse_args([*given, "--name=y"])
    assert (args.text, args.name, args.fast) == ("x", "y", True)
    with pytest.raises(SystemExit, match="2"):
        p.parse_args(given)
    assert capsys.readouterr().err.startswith(
        "error: one of the arguments --name --number is required"
    )


@pytest.mark.parametrize(
    "argv, error",
    [
        (["--dept=4"], "error: --dept: unknown flag; did you mean --depth? (all flags: --help)"),
        (["--input=x"], "error: --input: unknown flag; did you mean --input-dir?"),
        (["--zeal"], "error: --zeal: unknown flag"),
        ([], "error: the following arguments are required: --text"),
        (["--txet=x"], "error: --txet: unknown flag; did you mean --text?"),
        (["--text=x", "y"], "error: unrecognized arguments: y"),
        (["rows", "--txet=x"], "error: --txet: unknown flag; did you mean --text?"),
        (["--resume-from-step=7"], "error: --resume-from-step: use --resume=PATH"),
        (["--depth=four", "--text=x"], "error: argument --depth: invalid int value: 'four'"),
        (["--depth=1", "--text=x"], "error: argument --depth: got 1, expected at least 2, or -1"),
    ],
)
def test_an_error_is_one_line_that_suggests_the_flag(argv, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        (commands() if argv[:1] == ["rows"] else parser()).parse_args(argv)
    err = capsys.readouterr().err
    assert err.startswith(error) and err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--data-path", "--val-path"])
@pytest.mark.parametrize("blank", ["", " ", "\n", "1,", ",a", "0.5,a,0.5, "])
def test_a_path_of_data_that_is_blank_is_refused(flag, blank, capsys):
    """Regression: a line break was "no such data folder", below an empty line, and the validation
    data of an unset shell variable were those of the present folder."""
    p = parser()
    p.add_argument(flag)
    with pytest.raises(SystemExit, match="2"):
        p.parse_args(["--text=x", f"{flag}={blank}"])
    err = capsys.readouterr().err
    assert err.startswith(f"error: {flag}: got {blank!r}, ") and "blank" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "word",
    [
        "--text=s3://KEY:hid/den@bucket/x",
        "s3://bucket/x?hidden",
        "--depth=gs://hidden@b",
        "S3://KEY:hidden@bucket/x",
        "--input-dir=70,/p/a,30,s3://KEY:hid/den@bucket/x",
        "--text=https://KEY:hidden@host/x",
        "http://host/x?sig=hidden",
        "-phttps://hidden@host",
        "--text=HTTPS://hidden@host",
        "--zeal=ftp://KEY:hidden@host",
        "--text=http:/KEY:hid den@host",
        "--config=https://u:hidden@host/a.yaml",
    ],
)
def test_a_url_that_may_hold_a_secret_is_refused_in_every_flag(word):
    """Regression: URLs in a blend, in flags for local paths, and with other schemes were shown in
    full."""
    for read in (lambda: parser().parse_args([word]), lambda: as_path(word)):
        with pytest.raises(ValueError, match="credentials do not belong in a path") as e:
            read()
        assert "hid" not in str(e.value)
        assert str(e.value).startswith(
            word.partition("=")[0] if word.startswith("--") else "a URL with"
        )
    plain = "s3://b/2024@1/x,s3://c/y"
    assert (
        parser().parse_args([f"--text={plain}"]).text == plain
        and str(as_path("a/b@c?")) == "a/b@c?"
    )


def run_python(code, **env):
    """Run a program in another process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("lines", [3, 100_000])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_a_command_quietly(lines, unbuffered):
    """Regression: `... | head` ended in "[Errno 32] Broken pipe"."""
    done = run_python(
        f"""import os
read, write = os.pipe()
os.dup2(write, 1)
os.close(read)
from nanochat.cli import run_main
run_main(lambda: print('\\n'.join(['text'] * {lines})))""",
        PYTHONUNBUFFERED=unbuffered,
    )
    assert (done.returncode, done.stderr) == (141, "")


WITHOUT_READER = """import os, sys
read, write = os.pipe()
out = os.dup(1)
for fd in ({fds}):
    os.dup2(write, fd)
os.close(read)
import logging
from nanochat.cli import lasting_output, run_main, setup_logging
from nanochat.common import print0
def main():
    with lasting_output():
        setup_logging()
        for number in range(3):
            print0('text' * 10_000)
            logging.getLogger('nanochat').warning('text')
            print('text', file=sys.stderr, flush=True)
        os.write(out, b'to the end')
    return 7
run_main(main)"""


@pytest.mark.parametrize("fds", ["1,", "2,", "1, 2"])
def test_a_closed_output_ends_no_run(fds):
    """Regression: a run ended unsaved after `| head`, or when its terminal closed."""
    done = run_python(WITHOUT_READER.format(fds=fds))
    assert done.returncode == 7 and done.stdout.endswith("to the end")
    assert (done.stderr == "") == ("2" in fds)


def test_a_full_disk_under_stdout_ends_no_run(tmp_path):
    with open("/dev/full", "w") as full:
        code = """from nanochat.cli import lasting_output, run_main
with lasting_output():
    run_main(lambda: print('text', flush=True) or 7)"""
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, cwd=Path(__file__).parents[2]
        )
    assert done.returncode == 7


def test_a_file_never_takes_the_place_of_a_closed_stdout(tmp_path):
    """Otherwise it would receive what the program and its children print."""
    code = f"""import os
os.close(1)
from nanochat.cli import run_main
def main():
    with open({str(tmp_path / "file")!r}, "wb", buffering=0) as file:
        os.write(1, b"text")
        return file.fileno()
run_main(main)"""
    done = run_python(code)
    assert done.returncode > 2 and (tmp_path / "file").read_bytes() == b""


def test_output_never_fails_to_encode_and_never_controls_the_terminal():
    """Regression: a character that stdout could not encode ended a run in its last evaluation."""
    done = run_python(
        """import logging
from nanochat.cli import run_main, setup_logging
def main():
    setup_logging()
    print('caf\\u00e9 \\ud800')
    log = logging.getLogger('nanochat.x')
    log.info('%s', 'information')
    log.warning('%s', HOSTILE + '\\u00e9 http://u:hid@h/x?hid')
    raise ValueError(HOSTILE + 'a\\n\\u6f22 https://u:hid@h/x?hid.')
run_main(main)""".replace("HOSTILE", ascii(HOSTILE)),
        PYTHONIOENCODING="ascii:strict",
    )
    assert (done.returncode, done.stdout) == (1, "caf\\xe9 \\ud800\n")
    assert done.stderr == (
        "information\n"
        rf"warning: {SHOWN}\xe9 http://***@h/x?***"
        "\n"
        rf"error: {SHOWN}a"
        "\n"
        r"\u6f22 https://***@h/x?***"
        "\n"
    )


@pytest.mark.parametrize("base", ["file/base", "file"])
def test_a_base_directory_that_cannot_be_written_names_its_variable(tmp_path, monkeypatch, base):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / base))
    with pytest.raises(
        OSError, match=r"the base directory cannot be created .*; set NANOCHAT_BASE_DIR to a folder"
    ):
        get_base_dir()


@pytest.mark.parametrize("number", ["1.10", "007", "2024_01_05", "1:30"])
def test_a_number_for_a_text_is_refused_because_it_is_not_what_was_written(
    tmp_path, capsys, number
):
    """Regression: the run 1.1 was trained, or resumed, for model-tag: 1.10."""
    path = tmp_path / "flags.yaml"
    p = parser()
    p.add_argument("--folder", type=Path)
    for name in ("text", "folder"):
        path.write_text(f"{name}: {number}\n")
        with pytest.raises(SystemExit, match="2"):
            p.parse_args([f"--config={path}"])
        assert f"--{name}: got the number" in capsys.readouterr().err
    for text in (f"'{number}'", f"[a, {number}]"):
        path.write_text(f"text: {text}\n")
        p.parse_args([f"--config={path}"])


def test_a_closed_stderr_takes_what_is_printed_there():
    """Regression: 'NoneType' object has no attribute 'write', of a progress bar."""
    write = "run_main(lambda: sys.stderr.write('x') and 0)"
    child = f"import sys; from nanochat.cli import run_main; {write}"
    for closing in ("2>&-", ">&- 2>&-"):
        command_line = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(child)} {closing}"
        assert subprocess.run(["bash", "-c", command_line], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "text, value",
    [
        ("", None),
        ("a: 1\nb: [1_000, +2, 1e5]\n", {"a": 1, "b": [1000, 2, "1e5"]}),
        ("'1'", "1"),
        ("{yes: No, 'no': ~}", {True: False, "no": None}),
        ("a: &x 1\nb: *x", {"a": 1, "b": 1}),
    ],
)
def test_a_yaml_file_is_read_as_pyyaml_reads_it(tmp_path, text, value):
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml") == value


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[a]: 1", "line 1: "),
        ("1\n---\n2", "but found another document"),
        ("9" * 5000, "not valid YAML"),
        ("{a: 1", "line 1: "),
        ("a: !!float []", "not valid YAML"),
        ("a: !x 1", "!x"),
        ("a: !!float ''", "not valid YAML"),
        ("[" * 21 + "]" * 21, "nested more than 20"),
        ("[" * 200_000, "nested more than 20"),
        (BOMB, "values"),
        ("{a: " * 21 + "}" * 21, "nested more than 20"),
        ("a" * 600_000, "more than 524,288 bytes"),
    ],
)
def test_what_is_not_yaml_or_too_large_is_refused(tmp_path, text, words):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("ending", "code"), [("return 3", 3), ("raise RuntimeError('a bug')", 1), ("sys.exit(2)", 2)]
)
def test_what_hangs_after_a_command_does_not_keep_it_from_its_end(ending, code):
    """Regression: a bug after a tracker had hung left a process that never ended."""
    result = run_python(f"""import sys, threading
from nanochat import cli
cli.LEAVE_S = 0.2

def main():
    cli.leave_soon()
    threading.Thread(target=threading.Event().wait).start()
    {ending}

cli.run_main(main)""")
    assert result.returncode == code and ("a bug" in result.stderr) == ("a bug" in ending)


def test_ctrl_c_shows_no_traceback_while_a_command_imports_torch_and_interrupts_it_afterwards():
    """Python imports the package of `-m scripts.X` while sys.argv[0] is "-m"."""
    child = """import os, signal, sys
sys.argv[0] = {argv0!r}
import scripts
from nanochat.cli import run_main
{before}
run_main(lambda: os.kill(os.getpid(), signal.SIGINT))"""
    kill = "os.kill(os.getpid(), signal.SIGINT)"
    for argv0, before, code, words in (
        ("-m", kill, -2, ""),
        ("-m", "", 130, "interrupted\n"),
        ("tests", "", 130, "interrupted\n"),
    ):
        result = run_python(child.format(argv0=argv0, before=before))
        assert (result.returncode, result.stderr) == (code, words)
