"""Make a corpus of real text without a network: sources and documentation of the Python packages
that dev/setup.sh installs. Everyone gets the same corpus.

    python -m dev.make_sample_corpus --output-dir=mytext

The corpus has two buckets. `code` holds sources of packages that pyproject.toml pins. `docs` holds
docstrings, one document per module. A module contributes its source or its docstrings, never both,
so that validation does not contain text that a model saw in training. A long source makes several
documents.

    modules --sorted by hash(seed, name)--> two of three: source       --> distinct, not short, not a table --> kept
                                            one of three: docstrings   --> same                             --> kept
    kept --sorted by hash(seed, text)--> shard_00000 ... shard_00007 | shard_00008 = validation, 5 % of the documents

By default every shard mixes both buckets (columns `text` and `bucket`), so the folder is one bucket
for training, and its last file contains validation text from both. `--buckets` writes the folders
`code/` and `docs/` instead, each with its own shards and validation shard, for a curriculum to mix.

Why everyone gets the same text: the files are those that a package's own list (RECORD) names, in
pinned versions; PyTorch is left out because its builds differ, and the standard library because
every Python has another one. Files that differ between platforms are left out, too (`VARIES`).
Hashes replace a random generator, so the order in which a disk lists files does not matter. If a
package is missing or has another version, a warning says so. The digest of all texts is printed,
and compared with the known one for the default settings; `sample_corpus.json` beside the shards
records it.
"""

import ast
import contextlib
import gc
import hashlib
import itertools
import logging
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dev.repackage_data_reference import PARQUET, ROW_GROUP_DOCUMENTS, WAY_OUT
from nanochat.cli import Parser, run_main, setup_logging
from nanochat.common import as_local_path, get_base_dir, read_json, write_json
from nanochat.files import index_to_filename
from scripts.export import new_folder

log = logging.getLogger(__name__)

# direct dependencies whose Python files are the same in the wheels of all platforms and Pythons,
# except for:
PACKAGES = (
    "numpy",
    "matplotlib",
    "mypy",
    "wandb",
    "hypothesis",
    "pyarrow",
    "huggingface-hub",
    "pytest",
    "requests",
    "tqdm",
)
VARIES = ("numpy/__init__.py", "numpy/__config__.py", "numpy/distutils/", "pyarrow/__init__.py")
PROJECT = Path(__file__).parent.parent / "pyproject.toml"
KNOWN_DIGEST = "79e3ecc3613118f2"  # of the corpus with the default settings

MANIFEST = "sample_corpus.json"
FORMAT = 2  # increase it when the same settings make another corpus
MIN_DOCUMENT_CHARS = 200  # shorter documents contain little text
MAX_DOCUMENT_CHARS = 50_000  # longer sources are divided: fewer documents shuffle less well
# of the characters: docstrings are rarer than code and slow to extract
DOCS_SHARE = 0.2
VAL_SHARE = 0.05  # of the documents
SCHEMA = pa.schema([("text", pa.string()), ("bucket", pa.string())])


@dataclass(frozen=True)
class Settings:
    """Everything that determines the corpus, apart from the packages."""

    seed: int = 0
    min_chars: int = 20_000_000  # of training text; less is an error
    max_chars: int = 32_000_000  # of all text; collecting stops here
    num_shards: int = 8  # for training
    buckets: bool = False
    format: int = FORMAT


Document = tuple[str, str]  # text; bucket, code or docs


def _key(*parts: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


# ---- collecting ----------------------------------------------------------------------------------


def pinned_versions() -> dict[str, str]:
    """{package: version} of the direct dependencies that pyproject.toml pins and dev/setup.sh
    installs."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    pinned = {}
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        name, _, version = requirement.partition("==")
        pinned[name] = version
    return pinned


def find_modules() -> dict[str, Path]:
    """{name: path} of the Python files of PACKAGES. Warns about a package that is missing or has
    another version, with which the corpus differs from everyone else's."""
    modules, pinned = dict[str, Path](), pinned_versions()
    for package in PACKAGES:
        try:
            installed = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            log.warning(
                "%s is not installed, so this corpus lacks its text; run bash dev/setup.sh", package
            )
            continue
        if installed.version != pinned[package]:
            log.warning(
                "%s %s is installed, but the corpus is defined with %s; run bash dev/setup.sh",
                package,
                installed.version,
                pinned[package],
            )
        for file in installed.files or ():  # as its RECORD lists them
            name = file.as_posix()
            if name.endswith(".py") and not name.startswith(("..", *VARIES)):
                modules[name] = Path(str(file.locate()))
    return modules


def pieces(source: str) -> Iterator[str]:
    """A source in whole lines, in pieces of at most MAX_DOCUMENT_CHARS; a longer line is a piece by
    itself."""
    piece = ""
    for line in source.splitlines(keepends=True):
        if piece and len(piece) + len(line) > MAX_DOCUMENT_CHARS:
            yield piece
            piece = ""
        piece += line
    yield piece


def docstrings(name: str, source: str) -> str:
    """The docstrings of a module, its classes and functions in order, each under its dotted name;
    "" if the module does not parse."""
    gc.disable()  # a syntax tree has no circles, and looking for them takes half of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in old code
            # a newer Python accepts no more than this
            tree = ast.parse(source, feature_version=(3, 11))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    finally:
        gc.enable()
    parts: list[str] = []

    def visit(node: ast.AST, dotted: str) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if doc := ast.get_docstring(node):
                parts.append(f"{dotted}\n\n{doc}")
            for child in node.body:
                visit(child, f"{dotted}.{getattr(child, 'name', '')}")

    visit(tree, name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return "\n\n\n".join(parts)


def collect(modules: Mapping[str, Path], settings: Settings) -> list[Document]:
    """Distinct documents of both buckets, at most about max_chars in total, shuffled. They are the
    source or the docstrings of one module after another, in an order that depends on the seed."""
    room = {"docs": settings.max_chars * DOCS_SHARE, "code": settings.max_chars * (1 - DOCS_SHARE)}
    kept: dict[bytes, Document] = {}
    with tqdm(total=settings.max_chars, unit="char", unit_scale=True, disable=None) as bar:

        def take(text: str, bucket: str) -> None:
            key, chars = _key(settings.seed, text), len(text)
            if (
                MIN_DOCUMENT_CHARS <= chars <= MAX_DOCUMENT_CHARS
                and key not in kept
                and room[bucket] > 0
            ):
                kept[key] = text, bucket
                room[bucket] -= chars
                bar.update(chars)

        for name in sorted(modules, key=lambda name: _key(settings.seed, "order", name)):
            bucket = "docs" if _key(settings.seed, "bucket", name)[0] % 3 == 0 else "code"
            if room[bucket] <= 0:
                continue
            with contextlib.suppress(UnicodeDecodeError, OSError):
                source = modules[name].read_text(encoding="utf-8")
                for text in [docstrings(name, source)] if bucket == "docs" else pieces(source):
                    take(text, bucket)
    return [kept[key] for key in sorted(kept)]


# ---- writing -------------------------------------------------------------------------------------


def write_corpus(documents: list[Document], output: Path, settings: Settings) -> dict:
    """Write shards of equal counts for training and a validation shard, in each bucket's folder or
    in one. Returns {relative name: {documents, chars}}."""
    layout = {"": documents}
    if settings.buckets:
        layout = {f"{b}/": [d for d in documents if d[1] == b] for b in ("code", "docs")}
    shards = {}
    for folder, members in layout.items():
        num_train = len(members) - round(len(members) * VAL_SHARE)
        edges = [num_train * i // settings.num_shards for i in range(settings.num_shards + 1)] + [
            len(members)
        ]
        for i, (start, stop) in enumerate(itertools.pairwise(edges)):
            shards[f"{folder}{index_to_filename(i)}"] = members[start:stop]
    counts = {
        name: {"documents": len(shard), "chars": sum(len(text) for text, _ in shard)}
        for name, shard in shards.items()
    }
    train_chars = sum(
        count["chars"]
        for name, count in counts.items()
        if not name.endswith(index_to_filename(settings.num_shards))
    )
    if train_chars < settings.min_chars or not all(shards.values()):
        raise ValueError(
            f"found {train_chars:,} characters of training text in {len(documents):,} documents, expected "
            f"--min-chars {settings.min_chars:,} and no empty shard; install more packages (bash "
            "dev/setup.sh), use the Python that has them, or lower --min-chars or --num-shards"
        )
    for name, shard in shards.items():
        (output / name).parent.mkdir(exist_ok=True)
        pq.write_table(
            pa.table([*zip(*shard)], SCHEMA),
            output / name,
            row_group_size=ROW_GROUP_DOCUMENTS,
            **PARQUET,
        )
    return counts


def is_made(output_dir: Path, settings: Settings) -> bool:
    """Whether the folder holds a complete corpus of these settings. ValueError if it holds one with
    other settings or missing files: a run may have pinned it, so only the user should delete it."""
    if not (output_dir / MANIFEST).exists():
        return False
    manifest = read_json(output_dir / MANIFEST)
    remedy = "choose another --output-dir or delete that folder"
    if manifest["settings"] != asdict(settings):
        raise ValueError(
            f"{output_dir}: its corpus has {manifest['settings']}, not {asdict(settings)}; {remedy}"
        )
    missing = [name for name in manifest["shards"] if not (output_dir / name).exists()]
    if missing:
        raise ValueError(f"{output_dir}: the corpus lacks {', '.join(missing)}; {remedy}")
    return True


def digest_of(documents: Sequence[Document]) -> str:
    """A hash of all texts and buckets, in order: 16 hexadecimal digits."""
    return _key(*itertools.chain.from_iterable(documents)).hex()[:16]


def make_sample_corpus(
    output_dir: Path, settings: Settings, *, modules: Mapping[str, Path] | None = None
) -> bool:
    """Write the corpus of `modules`, {name: path} (default: those of PACKAGES), to `output_dir`,
    which appears when it is complete. Returns False if it already exists. ValueError if it holds
    something else."""
    if is_made(as_local_path(output_dir, "--output-dir"), settings):
        return False
    with new_folder(output_dir, WAY_OUT) as folder:
        documents = collect(find_modules() if modules is None else modules, settings)
        shards = write_corpus(documents, folder, settings)
        write_json(
            folder / MANIFEST,
            {
                "settings": asdict(settings),
                "python": sys.version,
                "digest": digest_of(documents),
                "shards": shards,
            },
        )
    return True


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--output-dir", type=Path, help="where to write (default: $NANOCHAT_BASE_DIR/data/sample)"
    )
    parser.add_argument(
        "--seed", type=int, default=Settings.seed, help="selects and shuffles the text"
    )
    parser.add_argument(
        "--min-chars",
        type=int,
        help="fail with less training text (default: 20 million, or 5/8 of --max-chars if less)",
    )
    parser.add_argument(
        "--max-chars",
        type=int,
        default=Settings.max_chars,
        help="stop collecting at this much text",
    )
    parser.add_argument(
        "--num-shards",
        type=int,
        default=Settings.num_shards,
        help="training shards; there is one more for validation",
    )
    parser.add_argument(
        "--buckets",
        action="store_true",
        help="write folders code/ and docs/ instead of mixed shards",
    )
    args = parser.parse_args(argv)
    setup_logging()
    output_dir = args.output_dir or get_base_dir() / "data" / "sample"
    min_chars = (
        min(Settings.min_chars, args.max_chars * 5 // 8)
        if args.min_chars is None
        else args.min_chars
    )
    settings = Settings(args.seed, min_chars, args.max_chars, args.num_shards, args.buckets)
    is_new = make_sample_corpus(output_dir, settings)
    manifest = read_json(output_dir / MANIFEST)
    shards, digest = manifest["shards"], manifest["digest"]
    for name, counts in shards.items():
        print(f"{name}: {counts['documents']:,} documents, {counts['chars']:,} characters")
    total = sum(counts["chars"] for counts in shards.values())
    print(
        f"{output_dir}: {total:,} characters in {len(shards)} shards{'' if is_new else ' (already existed)'}, "
        f"digest {digest}"
    )
    if replace(settings, buckets=False) == Settings() and digest != KNOWN_DIGEST:
        print(
            f"note: everyone else's corpus has the digest {KNOWN_DIGEST}; training works with yours, but its losses "
            f"are others. bash dev/setup.sh installs the packages of which the corpus is made"
        )


if __name__ == "__main__":
    run_main(main)
