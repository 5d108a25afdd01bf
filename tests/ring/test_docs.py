"""The docs are correct: the files, links, settings and flags that they name exist, and the pages
are short."""

import ast
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import nanochat
from dev.e2e_docs import blocks, pages, run_pages
from nanochat.config import settings_table
from nanochat.run_stop import SIGNALS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def test_the_file_map_lists_every_module_and_no_other():
    listed = set(
        re.findall(
            r"^\| `([^`]+\.py)` \| \S", (ROOT / "dev/ARCHITECTURE.md").read_text(), re.MULTILINE
        )
    )
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "nanochat").rglob("*.py")
        if not path.stem.endswith("__")
    }
    new, gone = sorted(modules - listed), sorted(listed - modules)
    assert not new and not gone and len(modules) > 40, (
        f"dev/ARCHITECTURE.md, File map: add a line for {new}, remove those of {gone}"
    )


def test_the_map_of_the_package_names_every_module():
    words = set(re.findall(r"\w+", nanochat.__doc__))
    modules = {path.stem for path in (ROOT / "nanochat").glob("[!_]*.py")}
    missing = sorted(modules - words)
    assert not missing and len(modules) > 40, f"nanochat/__init__.py: name {missing} in its map"


def test_the_table_of_settings_is_that_of_the_code():
    assert settings_table() in (ROOT / "docs/reference.md").read_text(), (
        "docs/reference.md: its table of settings is not that of the code. Replace it with the output of "
        "python -c 'from nanochat.config import settings_table; print(settings_table(), end=\"\")'"
    )


def test_hints_never_name_the_package_of_the_same_name_on_pypi():
    files = [
        file
        for folder in ("nanochat", "scripts", "dev", "docs", "runs", "tests")
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in (".py", ".md", ".sh")
    ]
    assert (
        len(files) > 150
        and [str(file) for file in files if "nanochat" + "[" in file.read_text()] == []
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_and_its_links_work(page):
    lines = page.read_text().splitlines()
    assert len(lines) <= (200 if page.name == "reference.md" else 150)
    assert [
        line for line in lines if len(line) > 120 and not (line.startswith("|") and page != README)
    ] == []
    links = [
        link
        for link in re.findall(r"\]\(([^)#]+)", page.read_text())
        if not link.startswith("http")
    ]
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(
        r"^#+ (.+)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_headings_work():
    links = [
        (page, link)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "dev").glob("*.md")]
        for link in re.findall(r"\]\((?!http)([^)]*#[^)]+)", page.read_text())
    ]
    wrong = [
        (page.name, link)
        for page, link in links
        for name, _, anchor in [link.partition("#")]
        if anchor not in anchors(page.parent / name if name else page)
    ]
    assert len(links) > 20 and wrong == []


def flags_of(capsys, module, *words):
    """The flags in `python -m MODULE WORDS --help`, or --help-all."""
    capsys.readouterr()
    every = "--help-all" if module == "scripts.base_train" else "--help"
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(module).main([*words, every])
    return re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", capsys.readouterr().out)


def commands(page):
    """The words after `-m` of each of our commands in a page, in blocks and in sentences."""
    lines = re.findall(r"`(python -m [^`]*)`", page.read_text())
    lines += [
        command for block in blocks(page) if block.language == "sh" for command in block.commands()
    ]
    for line in lines:
        words = shlex.split(line.partition("<<")[0].replace("\\\n", " "), comments=True)
        # flags after it are base_train's
        words = words[: words.index("--")] if "--" in words else words
        yield from (
            words[i + 1 :]
            for i, word in enumerate(words[:-1])
            if word == "-m" and words[i + 1].startswith(("scripts.", "nanochat.", "dev."))
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_run_or_names_what_else_runs_it(page):
    text, all_blocks = page.read_text(), [*blocks(page)]
    assert text.count("```") == 2 * len(all_blocks)
    assert text.count("not run here") == sum(block.reason is not None for block in all_blocks)
    assert {block.language for block in all_blocks} <= {"sh", "python", "text"}
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    shown = [
        line for block in all_blocks if block.language == "text" for line in block.text.splitlines()
    ]
    assert [line for line in outside if line.startswith(("    ", "\t"))] == [], (
        "indented blocks are not run"
    )
    assert [
        line for line in shown if re.match(r"\$ |(python|torchrun|bash|pip|sbatch) ", line)
    ] == [], "nor is text"
    for reason in filter(None, (block.reason for block in all_blocks)):
        named = re.findall(r"(?:tests|dev)/(?:\w+/)*\w+\.(?:py|sh)", reason)
        assert [name for name in named if not (ROOT / name).exists()] == []
        assert "; " in reason and (named or "nothing here runs it" in reason), reason


def test_the_script_that_runs_the_blocks_reads_all_pages_and_whole_commands(tmp_path):
    assert sorted(pages(ROOT)) == sorted(PAGES) and pages(ROOT)[0] == README
    (tmp_path / "page.md").write_text("""```sh
a b \\
  c    # exit code 3
cat >x <<'END'
  y \\
END
d
```
<!-- not run here: it is
long; nothing here runs it -->
```python
import x
y = 1
```
```text
-> row
```
""")
    parsed = [(b.language, b.reason, b.commands()) for b in blocks(tmp_path / "page.md")]
    assert parsed == [
        ("sh", None, ["a b \\\n  c    # exit code 3\n", "cat >x <<'END'\n  y \\\nEND\n", "d\n"]),
        ("python", "it is long; nothing here runs it", ["import x\ny = 1\n"]),
        ("text", None, []),
    ]


def test_the_recipe_for_source_files_makes_documents_with_their_paths(tmp_path):
    (tmp_path / "nanochat").mkdir()
    for name in ("b.md", "a.py", "c.png"):
        (tmp_path / "nanochat" / name).write_text(name)
    [recipe] = [block.text for block in blocks(ROOT / "docs/data.md") if "rglob" in block.text]
    recipe = recipe.replace("python", sys.executable)
    subprocess.run(["bash", "-c", recipe], cwd=tmp_path, check=True)
    made = (tmp_path / "mysources/nanochat.jsonl").read_text()
    assert [json.loads(line) for line in made.splitlines()] == [
        {"path": "nanochat/a.py", "text": "a.py"},
        {"path": "nanochat/b.md", "text": "b.md"},
    ]


def test_outcomes_are_those_of_the_commands_and_exports_last(tmp_path):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "page.md").write_text("""```sh
export X=5
exit $X    # exit code 5
exit $X
```
<!-- not run here: no; nothing here runs it -->
```sh
touch made
```
""")
    rows = run_pages([tmp_path / "page.md"], tmp_path, {**os.environ})
    assert [row[3] for row in rows] == ["0", "5", "5 FAILED", "not run: no; nothing here runs it"]
    assert [row[1] for row in rows] == [
        "export X=5",
        "exit $X # exit code 5",
        "exit $X",
        "touch made",
    ]
    assert not any((tmp_path / "checkout").iterdir())


def split_at_dashes(words):
    """A command, and the command of scripts.base_train whose flags follow its `--`."""
    at = words.index("--") if "--" in words else len(words)
    return [words[:at], *([["scripts.base_train", *words[at + 1 :]]] if at < len(words) else [])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_exist_with_their_flags(page, capsys):
    shown = [words for command in commands(page) for words in split_at_dashes(command)]
    for module, *words in shown:
        assert callable(importlib.import_module(module).main)
        given = [
            word.partition("=")[0].replace("_", "-")
            for word in words
            if re.match(r"--?[a-z]", word)
        ]
        # what brings further flags: a subcommand, an order of its own
        more = [word for word in words if word.startswith("--order=")]
        if module == "scripts.inspect_data":
            more = words[:1]
        known = flags_of(capsys, module, *more) if given else []
        assert [flag for flag in given if flag not in known] == [], f"{module} in {page.name}"


def test_every_list_of_signals_for_torchrun_names_all_that_stop_a_run():
    """torchrun passes only these on to its processes; another one leaves them behind without a
    parent."""
    files = [
        path
        for folder in ("docs", "dev/slurm")
        for path in (ROOT / folder).iterdir()
        if path.is_file()
    ]
    lists = [
        found
        for path in files
        for found in re.findall(r"--signals-to-handle=([A-Z0-9,]+)", path.read_text())
    ]
    assert len(lists) >= 4
    wanted = {number.name for number in SIGNALS}
    assert [names for names in lists if not wanted <= {*names.split(",")}] == []


def test_flags_that_stand_for_those_of_other_projects_exist(capsys):
    known = {
        *flags_of(capsys, "scripts.base_train", "--order=megatron"),
        *flags_of(capsys, "scripts.tok_shards"),
    }
    rows = (ROOT / "docs/coming_from.md").read_text().splitlines()
    ours = [row.split("|")[-2] for row in rows if row.startswith("|")]
    named = re.findall(r"(?<!\S)`?(--[a-z][a-z_-]*)", " ".join(ours))
    assert len(named) > 25 and [flag for flag in named if flag.replace("_", "-") not in known] == []
    assert sum(1 for page in PAGES for _ in commands(page)) > 40, "the case: pages show commands"


@pytest.mark.parametrize(
    "module, names",
    [
        ("gpt", "GPT GPTConfig"),
        ("optim", "MuonAdamW"),
        ("engine", "Engine KVCache"),
        ("loss_eval", "evaluate_bpb"),
        ("tokenizer", "Tokenizer RustBPETokenizer get_tokenizer get_token_bytes"),
        (
            "dataset",
            "list_parquet_files parquets_iter_batched download_single_file index_to_filename BASE_URL MAX_SHARD "
            "DATA_DIR",
        ),
        (
            "common",
            "get_base_dir print0 compute_init compute_cleanup autodetect_device_type get_dist_info",
        ),
        (
            "dataloader",
            "tokenizing_distributed_data_loader_with_state_bos_bestfit "
            "tokenizing_distributed_data_loader_bos_bestfit tokenizing_distributed_data_loader_with_state "
            "tokenizing_distributed_data_loader",
        ),
    ],
)
def test_names_that_forks_import_are_where_nanochat_has_them(module, names):
    imported = importlib.import_module(f"nanochat.{module}")
    assert [n for n in names.split() if not hasattr(imported, n)] == []


@pytest.mark.parametrize("page", ["coming_from.md", "megatron.md"])
def test_our_names_in_the_table_of_another_projects_names_exist(page):
    table = (
        (ROOT / "docs" / page)
        .read_text()
        .split("| their name")[1]
        .partition("\n\n")[0]
        .splitlines()[2:]
    )
    names = [
        name for row in table for name in re.findall(r"`(nanochat\.[\w.]+)", row.split("|")[2])
    ]
    for name in names:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name
    assert len(names) > 20
    assert [
        row
        for row in table
        if not re.search("`nanochat|`decode|not here|not needed|the same|`Indexed", row)
    ] == []


def code_lines(path):
    """The number of lines that are neither blank nor a comment nor part of a docstring."""
    source = path.read_text()
    docstrings = set()
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    blank = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_the_readme_counts_the_lines_from_a_file_to_an_update():
    """Regression: it said 1,600, and left out half of the modules."""
    said = re.search(
        r"an update is ([\d,]+) lines of code in (\d+) modules: (.+?)\. \[",
        README.read_text(),
        re.S,
    )
    names = [Path(name).name for name in re.findall(r"`([\w/]+\.py)`", said[3])]
    paths = [ROOT / ("scripts" if name == "base_train.py" else "nanochat") / name for name in names]
    assert len(paths) == int(said[2]) and {"order.py", "sources.py", "trainer.py", "optim.py"} < {
        *names
    }
    actual = sum(map(code_lines, paths))
    assert abs(actual / int(said[1].replace(",", "")) - 1) < 0.03, (
        f"update the README: {actual:,} lines"
    )
