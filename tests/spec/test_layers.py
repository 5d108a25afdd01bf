"""The law of layers: every import in nanochat/ and scripts/, also inside functions, points to a
lower layer."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "dev/ARCHITECTURE.md").read_text()


def modules():
    """{module: file} of the package and the commands."""
    files = [*(ROOT / "nanochat").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return {
        name: file for name, file in names.items() if not name.endswith("__")
    }  # __main__ is the commands'


def imports_of(file, known):
    """{(imported module, whether the import is inside a function)} of a file, of the modules in
    `known`."""
    found = set()

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and child.module:
                names = [child.module, *(f"{child.module}.{alias.name}" for alias in child.names)]
                found.update((name, inside) for name in names if name in known)
            elif isinstance(child, ast.Import):
                found.update((alias.name, inside) for alias in child.names if alias.name in known)
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(ast.parse(file.read_text()), False)
    return found


def layers():
    """{module: number of its layer}, from the table in dev/ARCHITECTURE.md."""
    table = {}
    for number, names in re.findall(r"^ {4,5}(\d+)  (.*)$", TABLE, re.MULTILINE):
        for name in names.split():
            table[f"nanochat.{name}"] = int(number)
    return table


FILES = modules()
IMPORTS = {name: imports_of(file, FILES) for name, file in FILES.items()}
LAYERS = layers()
# why an import is inside a function, which defers what takes seconds or what most launches do not
# need
DEFERRED = {
    (
        "nanochat.integrations.download",
        "nanochat.core_eval",
    ): "PyTorch, which a download does not need",
    **{
        ("nanochat.run_reader", f"nanochat.{name}"): "Arrow, which scripts.status does not need"
        for name in ("pins", "stream")
    },
    ("scripts.status", "nanochat.run_facts"): "PyTorch, needed only to rank by bits per byte",
    ("scripts.compare_runs", "nanochat.run_stream"): "PyTorch, needed only to name what differs",
    ("scripts.export", "nanochat.integrations.fast_encoders"): "tokenizers, for one kind of export",
    (
        "scripts.export",
        "nanochat.integrations.third_party_tokenizers",
    ): "tokenizers, for one kind of export",
    ("scripts.help", "nanochat.integrations.gpt_simple"): "PyTorch, for --translate only",
    ("scripts.verify", "nanochat.checkpoint"): "PyTorch, for checkpoints only",
    ("scripts.verify", "nanochat.config"): "PyTorch, for receipts only",
    ("scripts.verify", "nanochat.receipt_check"): "PyTorch, for receipts only",
}


def test_every_core_module_has_a_layer():
    core = {name for name in FILES if name.startswith("nanochat.") and name.count(".") == 1}
    new, gone = sorted(core - set(LAYERS)), sorted(set(LAYERS) - core)
    assert not new and not gone and len(core) > 40, (
        f"dev/ARCHITECTURE.md, Layers: put {new} one layer above the modules that they import, remove {gone}"
    )


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_module_imports_only_from_lower_layers(name):
    core = {imported for imported, _ in IMPORTS[name] if imported in LAYERS}
    higher = {imported: LAYERS[imported] for imported in core if LAYERS[imported] >= LAYERS[name]}
    assert not higher, f"{name} is in layer {LAYERS[name]}"


def test_no_core_module_but_the_download_command_imports_an_integration():
    """Integrations enter through doors (`common.open_door`)."""
    ring = {
        (name, imported)
        for name in LAYERS
        for imported, _ in IMPORTS[name]
        if ".integrations." in imported
    }
    assert ring == {("nanochat.dataset", "nanochat.integrations.download")}


def test_an_integration_imports_nothing_at_or_above_the_trainer():
    ring = {name for name in FILES if ".integrations." in name}
    high = {
        (name, imported)
        for name in ring
        for imported, _ in IMPORTS[name]
        if LAYERS.get(imported, 0) >= LAYERS["nanochat.trainer"]
    }
    assert len(ring) > 10 and high == set()


def test_no_module_imports_a_command():
    """A command may use another one."""
    assert [
        name
        for name in FILES
        if name.startswith("nanochat.")
        and any(imported.startswith("scripts.") for imported, _ in IMPORTS[name])
    ] == []


def test_imports_form_no_circle():
    """Removing modules that import no remaining one, again and again, leaves none."""
    rest = {name: {imported for imported, _ in IMPORTS[name]} for name in FILES}
    while free := [name for name, imported in rest.items() if not imported & rest.keys()]:
        for name in free:
            del rest[name]
    assert rest == {}


def test_an_import_inside_a_function_has_a_reason():
    inside = {
        (name, imported) for name in FILES for imported, is_inside in IMPORTS[name] if is_inside
    }
    assert inside == set(DEFERRED)


def test_training_imports_no_search_for_benchmarks():
    loaded = {"scripts.base_train"}
    while more := {imported for name in loaded for imported, _ in IMPORTS[name]} - loaded:
        loaded |= more
    assert "nanochat.trainer" in loaded
    assert not loaded & {"nanochat.seen", "nanochat.ngrams", "nanochat.find", "nanochat.run_uses"}


def test_every_entry_of_a_door_opens():
    """A door names its parts by strings, which no linter checks."""
    from nanochat.common import STORAGE, open_door
    from nanochat.mirror_store import BUCKET
    from nanochat.order import ORDERS
    from nanochat.run_guard import MIRROR
    from nanochat.sinks import PROFILE, SINKS
    from nanochat.sources import SOURCES
    from nanochat.tokenizer import TOKENIZERS

    tables = (SOURCES, ORDERS, TOKENIZERS, SINKS, STORAGE)
    entries = [PROFILE, MIRROR, BUCKET, *(entry for table in tables for entry in table.values())]
    optional = {"tokenizers", "fastokens", "obstore"}  # packages of extras
    for entry in entries:
        try:
            assert open_door(entry) is not None
        except ModuleNotFoundError as e:
            assert e.name in optional, entry
    assert len(entries) > 10
