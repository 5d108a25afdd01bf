"""
Run what README.md and the pages of docs/ tell a reader to type, word by word, in the order of the README's links.

    README.md --> docs/first_run.md ...    one fresh copy of the checkout's files and one base directory:
      ```sh      a command after another   what a page makes is there for the pages behind it
      ```python  as one program

A block that cannot run like this says so in the page itself, in a comment right before it, which names what runs such
a command instead, or says that nothing does:

    <!-- not run here: two machines; tests/test_multi_node.py runs it -->
    <!-- not run here: a GPU; nothing here runs it -->

`s3://bucket` is an S3 server on loopback, empty at the start; the reader's text is what the README's command makes.

    python -m dev.e2e_docs     # ends with a table of all commands

Cost: nothing. Hardware: 2 cores, 2 GB in /dev/shm. Duration: ten minutes. Exit code 1 if a command's was not 0, or
what its comment says (`# exit code 1: they differ`); the folder with its output is then kept and named.
"""

import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat.cli import Parser, run_main
from nanochat.common import table

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:^<!-- not run here: ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 600  # of one command


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # its name
    language: str  # sh, python: commands; text: what is only looked at
    text: str
    reason: str | None  # why it is not run, None where it is

    def commands(self) -> list[str]:
        """The programs of a block, as they stand: a line, with what a backslash or a heredoc joins to it."""
        if self.language != "sh":
            return [self.text] if self.language == "python" else []
        found, end = [""], None
        for line in self.text.splitlines():
            found[-1] += line + "\n"
            heredoc = re.search(r"<<'(\w+)'", line)
            end = heredoc[1] if heredoc else None if line == end else end
            if end is None and not line.endswith("\\"):
                found.append("")
        return [command for command in found if command.strip()]


def pages(root: Path) -> list[Path]:
    """README.md below `root`, and the pages of docs/ in the order of its last table."""
    linked = re.findall(r"^\| \[(docs/\w+\.md)\]", (root / "README.md").read_text(), re.MULTILINE)
    return [root / name for name in ["README.md", *linked]]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for reason, language, text in BLOCK.findall(page.read_text()):
        yield Block(page.name, language, text, " ".join(reason.split()) or None)


def copy_checkout(target: Path) -> None:
    """Copy the files of the checkout that git knows, as they are now, and link its .venv."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(ROOT / ".venv")


def reader(work: Path, store_url: str) -> dict[str, str]:
    """The environment of somebody who has activated .venv and has a bucket."""
    from tests.object_store import environment

    return {**os.environ, **environment(store_url), "HOME": str(work / "home"), "OMP_NUM_THREADS": "1",
            "NANOCHAT_BASE_DIR": str(work / "home/.cache/nanochat"),
            "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}


def run(command: str, language: str, work: Path, env: dict[str, str]) -> tuple[float, int]:
    """Run one command; the seconds, and its exit code, 124 after LIMIT_S. What it prints is added to work/output, what
    it exports is in work/exported, for the commands behind it."""
    shell = f"source {work}/exported\n{command}\ncode=$?\nexport -p >{work}/exported\nexit $code"
    words = ["bash", "-c", shell] if language == "sh" else ["python", "-c", command]
    began = time.monotonic()
    with open(work / "output", "ab") as output:
        output.write(f"\n$ {command}".encode())
        output.flush()
        done = subprocess.run(["timeout", "--kill-after=10", str(LIMIT_S), *words], cwd=work / "checkout", env=env,
                              stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False)
    return time.monotonic() - began, done.returncode


def run_pages(pages: Sequence[Path], work: Path, env: dict[str, str]) -> list[tuple[str, str, str, str]]:
    """Run all commands of the pages; (page, command, seconds, exit code or why it is not run) of each."""
    rows = []
    for page in pages:
        (work / "exported").write_text("")
        for block in blocks(page):
            for command in block.commands():
                seconds, outcome = "", f"not run: {block.reason}"
                if block.reason is None:
                    took, code = run(command, block.language, work, env)
                    wanted = re.search(r"# exit code (\d+)", command)
                    verdict = "" if code == int(wanted[1] if wanted else 0) else " FAILED"
                    seconds, outcome = f"{took:.1f}", f"{code}{verdict}"
                rows.append((page.name, " ".join(command.replace("\\\n", " ").split()), seconds, outcome))
                print(*rows[-1], sep=" | ", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    Parser(description="Run every command of README.md and docs/.", epilog=__doc__).parse_args(argv)
    from tests.object_store import serve

    memory = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="e2e_docs_", dir=memory if memory.is_dir() else None))
    (work / "home").mkdir()
    copy_checkout(work / "checkout")
    with serve() as store:
        rows = run_pages(pages(work / "checkout"), work, reader(work, store.proxy.url))
    print(*table(("PAGE", "COMMAND", "SECONDS", "EXIT CODE"), rows), sep="\n")
    took = [float(row[2]) for row in rows if row[2]]
    failed = sum(row[3].endswith("FAILED") for row in rows)
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    print(f"{len(took)} commands ran in {sum(took):.0f} s ({used:.0f} s of processor time), {failed} failed; "
          f"{len(rows) - len(took)} were not run")
    if failed:
        print(f"e2e_docs: FAILED, see {work}/output")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    run_main(main)
