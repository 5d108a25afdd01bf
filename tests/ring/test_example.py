"""docs/example: the commands of docs/example.md work on the shipped folder alone, and print what the
page shows."""

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from dev.e2e_docs import blocks
from dev.make_sample_corpus import KNOWN_DIGEST, MANIFEST, Settings, make_sample_corpus
from tests.finished import command

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "example"
PAGE = ROOT / "docs" / "example.md"
MAX_BYTES = 3_000_000
TRAINED_IN = "/tmp/nanochat-example"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """[(command, its exit code and output, the lines that the page shows of it)] of all commands of
    the page, which run one after another in a folder that holds a copy of docs/example."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(EXAMPLE, folder / "docs" / "example")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NANOCHAT_BASE_DIR", "docs/example")
        yield list(run_page(folder))


def run_page(folder):
    """See `outcomes`. A block that the page marks as not run here is left out."""
    found = []
    for block in blocks(PAGE):
        if block.reason is not None:
            continue
        if block.language == "text":
            done, outcome, _ = found[-1]
            found[-1] = (done, outcome, block.text.splitlines())
            continue
        for line in block.commands():
            words = shlex.split(line, comments=True)
            if words[0] == "export":
                assert words == ["export", "NANOCHAT_BASE_DIR=docs/example"]
            elif words[2] == "dev.make_sample_corpus":
                make_sample_corpus(folder / "mytext", Settings())
            else:
                main = importlib.import_module(words[2]).main
                found.append((line, command(main, *words[3:]), []))
    digest = json.loads((folder / "mytext" / MANIFEST).read_text())["digest"]
    if digest != KNOWN_DIGEST:
        pytest.skip("the installed packages make another sample corpus")
    return found


def test_every_command_ends_with_the_exit_code_that_the_page_gives(outcomes):
    assert len(outcomes) > 8, "the case: the page has commands"
    for line, outcome, _ in outcomes:
        expected = re.search(r"# exit code (\d)", line)
        assert outcome.code == int(expected[1] if expected else 0), f"{line}{outcome.err}"


def test_every_command_prints_what_the_page_shows(outcomes):
    """`...` stands for any characters, and a line of it for any lines."""
    shown = 0
    for line, outcome, lines in outcomes:
        printed = outcome.out.splitlines() + outcome.err.splitlines()
        for wanted in lines:
            pattern = ".*".join(map(re.escape, wanted.split("...")))
            assert any(re.fullmatch(pattern, one.rstrip()) for one in printed), (
                f"{line}docs/example.md shows {wanted!r}, the command prints\n{outcome.out}"
            )
            shown += 1
    assert shown > 20, "the case: the page shows output"


def test_the_example_is_small_and_has_no_checkpoints():
    kept = ("runs", "receipt.json", "speedrun.html")  # git ignores what commands make here
    files = [path for path in EXAMPLE.rglob("*") if path.is_file()]
    shipped = [path for path in files if path.relative_to(EXAMPLE).parts[0] in kept]
    assert len(shipped) > 40 and sum(path.stat().st_size for path in shipped) < MAX_BYTES
    assert not any("checkpoints" in path.parts for path in shipped)


def test_the_example_names_no_machine():
    """It was trained under a host name and in a folder of its own, and no file was edited."""
    files = [
        *(EXAMPLE / "runs").rglob("*.json*"),
        EXAMPLE / "receipt.json",
        EXAMPLE / "speedrun.html",
    ]
    texts = {path: path.read_text() for path in files if path.suffix != ".gz"}
    assert len(texts) > 20
    for path, text in texts.items():
        outside = text.replace(TRAINED_IN, "")
        assert not re.search(r'["= ](/(tmp|root|home|work|usr|mnt|opt|data)\b[^"]*)', outside), path
        assert set(re.findall(r'"host": "([^"]*)"', text)) <= {"example"}, path
