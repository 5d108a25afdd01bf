"""
Run every command in README.md and docs/ exactly as written, in the order of the README's links.

    python -m dev.e2e_docs     # ends with a table of all commands

    README.md --> docs/first_run.md --> ...     all pages share a fresh copy of the checkout and a base directory,
      ```sh      one command at a time     so later pages can use the results of earlier ones
      ```python  as one program

If a block cannot run here, a comment right before it in the page gives the reason and names the
test that runs such a command instead, if there is one:

    <!-- not run here: two machines; tests/faults/test_multi_node.py runs it -->
    <!-- not run here: a GPU; nothing here runs it -->

The reader's text comes from the README's command.

Cost: nothing. Hardware: 2 cores, 2 GB in /dev/shm. Duration: ten minutes. Exit code 1 if a
command's exit code is not 0 or the one in its comment (`# exit code 1: they differ`). The folder
with the output is then kept and its path printed.
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
BLOCK = re.compile(
    r"(?:^<!-- not run here: ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LIMIT_S = 600  # per command


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # file name of the page
    language: str  # sh or python: commands; text: output
    text: str
    reason: str | None  # why it is not run, or None

    def commands(self) -> list[str]:
        """The commands of a block: each is a line, with the lines that a backslash or a heredoc
        joins to it."""
        if self.language != "sh":
            return [self.text] if self.language == "python" else []
        commands, end = [""], None
        for line in self.text.splitlines():
            commands[-1] += line + "\n"
            heredoc = re.search(r"<<'(\w+)'", line)
            end = heredoc[1] if heredoc else None if line == end else end
            if end is None and not line.endswith("\\"):
                commands.append("")
        return [command for command in commands if command.strip()]


def pages(root: Path) -> list[Path]:
    """README.md below `root`, then the pages of docs/ in the order of its last table."""
    linked = re.findall(r"^\| \[(docs/\w+\.md)\]", (root / "README.md").read_text(), re.MULTILINE)
    return [root / name for name in ["README.md", *linked]]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for reason, language, text in BLOCK.findall(page.read_text()):
        yield Block(page.name, language, text, " ".join(reason.split()) or None)


def run(command: str, language: str, work: Path, env: dict[str, str]) -> tuple[float, int]:
    """Run one command. Returns (seconds, exit code), with code 124 after LIMIT_S. Its output is
    appended to work/output. Variables that it exports are kept in work/exported, for later
    commands."""
    shell = f"source {work}/exported\n{command}\ncode=$?\nexport -p >{work}/exported\nexit $code"
    words = ["bash", "-c", shell] if language == "sh" else ["python", "-c", command]
    began = time.monotonic()
    with open(work / "output", "ab") as output:
        output.write(f"\n$ {command}".encode())
        output.flush()
        done = subprocess.run(
            ["timeout", "--kill-after=10", str(LIMIT_S), *words],
            cwd=work / "checkout",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return time.monotonic() - began, done.returncode


def run_pages(
    pages: Sequence[Path], work: Path, env: dict[str, str]
) -> list[tuple[str, str, str, str]]:
    """Run all commands of the pages. Returns (page, command, seconds, exit code or why it is not
    run) for each."""
    rows = []
    for page in pages:
        (work / "exported").write_text("")
        for block in blocks(page):
            for command in block.commands():
                seconds, outcome = "", f"not run: {block.reason}"
                if block.reason is None:
                    took, code = run(command, block.language, work, env)
                    expected = re.search(r"# exit code (\d+)", command)
                    verdict = "" if code == int(expected[1] if expected else 0) else " FAILED"
                    seconds, outcome = f"{took:.1f}", f"{code}{verdict}"
                rows.append(
                    (page.name, " ".join(command.replace("\\\n", " ").split()), seconds, outcome)
                )
                print(*rows[-1], sep=" | ", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    Parser(description=__doc__).parse_args(argv)
    memory = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="e2e_docs_", dir=memory if memory.is_dir() else None))
    (work / "home").mkdir()
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():  # the files that git tracks, in their present state
            (work / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, work / "checkout" / name)
    (work / "checkout" / ".venv").symlink_to(ROOT / ".venv")
    # of a reader who has activated .venv
    env = {
        **os.environ,
        "HOME": str(work / "home"),
        "OMP_NUM_THREADS": "1",
        "NANOCHAT_BASE_DIR": str(work / "home/.cache/nanochat"),
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
    }
    rows = run_pages(pages(work / "checkout"), work, env)
    print(*table(("PAGE", "COMMAND", "SECONDS", "EXIT CODE"), rows), sep="\n")
    took = [float(row[2]) for row in rows if row[2]]
    failed = sum(row[3].endswith("FAILED") for row in rows)
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    print(
        f"{len(took)} commands ran in {sum(took):.0f} s ({used:.0f} s of processor time), {failed} failed, "
        f"{len(rows) - len(took)} were not run"
    )
    if failed:
        print(f"e2e_docs: FAILED, see {work}/output")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    run_main(main)
