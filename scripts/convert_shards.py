"""
Turn pairs of token files from GPTS into Megatron's format or back, without loss:

    python -m scripts.convert_shards IN OUT --to megatron|gpts

Every pair below the folder IN becomes one of the same name below OUT, with the same documents in the same order; each
manifest.json and the tokenizer come along. What the new format cannot hold is kept in NAME.conversion.json beside the
pair (nanochat/convert.py says what), so converting OUT back gives the files that are in IN, byte for byte. Two things
are no part of that: records of scripts.tok_shards, and where in a foreign .bin the sequences lay, if not in order.

The same command goes on after a crash or Ctrl-C: what is finished is kept, unless its pair in IN changed. Exit code: 0,
1 with a sentence where a pair cannot be converted.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanochat.common import Parser, read_json, run_main, write_bytes
from nanochat.convert import back_to_gpts, back_to_megatron, checksums, to_gpts, to_megatron
from nanochat.dataset import data_folder, find_files
from nanochat.indexed import Documents
from nanochat.pairs import open_entries, scan_file
from nanochat.places import here
from nanochat.shards import MANIFEST_NAME, Index, ends_follow, new_manifest, read_manifest
from nanochat.sources import check_format

FORMAT, VERSION = "nanochat-conversion", 1
TARGETS = {"megatron": "megatron", "gpts": "shards"}  # --to: the --data-format of what is made
TOKENIZER = "tokenizer"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("input", type=Path, metavar="IN", help="folder of pairs; or PREFIX[,PREFIX...]")
    parser.add_argument("output", type=Path, metavar="OUT", help="another folder")
    parser.add_argument("--to", required=True, choices=list(TARGETS), help="the format to make")
    parser.add_argument("--eod", type=int, default=None, metavar="ID", help="what ends documents of GPTS pairs that no "
                        "manifest.json lists (default: the last id of each pair)")
    return parser.parse_args(argv)


# ---- one pair -------------------------------------------------------------------------------------------------------

def beside(pair: Path) -> Path:
    """Where what is kept of a pair lies, given its .bin."""
    return pair.with_name(f"{pair.name[:-4]}.conversion.json")


def state_of(pair: Path) -> dict[str, Any]:
    """What tells that a pair is still the same, without reading all of it."""
    found = scan_file(pair, pair.name)
    return {"size": found["size"], "footer": found["footer"], "mtime_ns": pair.stat().st_mtime_ns}


def read_conversion(pair: Path) -> dict[str, Any] | None:
    """What is kept of a pair, None where there is nothing; ValueError where it is of something else."""
    path = beside(pair)
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path}: expected {(FORMAT, VERSION)}; take it away to convert the pair as it is")
    return found


def finished(source: Path, target: Path, to: str) -> dict[str, Any] | None:
    """What is kept of a finished pair, if it would come out the same again."""
    done = read_conversion(target)
    sizes = {path: path.stat().st_size if path.exists() else -1 for path in (target, target.with_suffix(".idx"))}
    same = done is not None and done["to"] == to and done["source"] == state_of(source) and list(
        sizes.values()) == done["sizes"]
    return done if same else None


def convert(source: Path, target: Path, *, to: str, record: dict[str, Any] | None, eod: int | None,
            ends_follow: bool) -> dict[str, Any]:
    """Make the pair `target` (its .bin) of `source`, then what is kept of it, which is returned."""
    state, before = state_of(source), read_conversion(source)
    for path in (*target.parent.glob(f".{target.name[:-4]}.*.tmp"), beside(target)):
        path.unlink(missing_ok=True)
    entries, prefix = open_entries(source), target.with_name(target.name[:-4])
    original, kept = checksums(source), {}
    if before is not None and before["from"] == TARGETS[to] and not before["restored"]:
        check_kept(source, before, original)
        (back_to_gpts if to == "gpts" else back_to_megatron)(entries, prefix, before["kept"])
        check_back(source, target, before)
        record = before["record"]
    elif to == "gpts":
        assert isinstance(entries, Documents)
        kept = to_gpts(entries, prefix)
    else:
        assert isinstance(entries, Index)
        kept = to_megatron(entries, prefix, eod=eod, ends_follow=ends_follow)
    made = open_entries(target)
    done = {"format": FORMAT, "version": VERSION, "from": next(f for f in TARGETS.values() if f != TARGETS[to]),
            "to": to, "source": state, "original": original, "made": checksums(target), "kept": kept, "record": record,
            "sizes": [target.stat().st_size, target.with_suffix(".idx").stat().st_size],
            "entries": len(made), "tokens": made.num_tokens, "restored": not kept}
    write_bytes(beside(target), (json.dumps(done) + "\n").encode())
    return done


def check_kept(source: Path, before: dict[str, Any], found: dict[str, Any]) -> None:
    """ValueError if a pair is not the one that its conversion.json was kept for."""
    if before["made"] != found:
        raise ValueError(f"{source}: it is not the pair that {beside(source).name} was kept for; bring that one back, "
                         f"or take {beside(source).name} away to convert this one as it is")


def check_back(source: Path, target: Path, before: dict[str, Any]) -> None:
    """ValueError, and no pair, if what was made is not what there was before."""
    if before["kept"].get("in_order", True) and checksums(target) != before["original"]:
        for path in (target.with_suffix(".idx"), target):
            path.unlink()
        raise ValueError(f"{source}: converted back it is not what it was made of; {beside(source).name} is damaged: "
                         f"take it away to convert the pair as it is")


# ---- a folder -------------------------------------------------------------------------------------------------------

def new_record(done: dict[str, Any], manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """What manifest.json says of a pair that was made of one with a record."""
    if done["restored"]:
        return done["record"]
    record = {**manifest["shards"][name], **done["made"], "entries": done["entries"], "tokens": done["tokens"]}
    if manifest["shards"][name]["entries"] != done["entries"]:
        record.pop("groups", None)
    return record


def write_manifest(folder: Path, target: Path, done: dict[str, dict[str, Any]], to: str) -> None:
    """The manifest of a folder that was made of one with a manifest."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    shards = {name: new_record(done[name], manifest, name) for name in manifest["shards"] if name in done}
    was = manifest.get("converted_from", {"data_format": None})
    back = was["data_format"] == TARGETS[to]
    arguments = was["arguments"] if back else manifest["arguments"]
    whole = {**arguments, "max_length": 0, "overlap_size": 0}
    made = new_manifest(manifest["tokenizer"], whole if to == "megatron" and not back else arguments, shards,
                        data_format=TARGETS[to])
    if made["arguments"] != manifest["arguments"] and not back:
        made["converted_from"] = {"data_format": manifest.get("data_format", "shards"), "arguments": arguments}
    write_bytes(target / MANIFEST_NAME, (json.dumps(made, indent=2, sort_keys=True) + "\n").encode())


def copy_tokenizer(source: Path, target: Path) -> None:
    """Put the tokenizer that lies beside pairs beside the new ones."""
    for file in sorted((source / TOKENIZER).glob("*")):
        if file.is_file() and not file.name.startswith("."):
            (target / TOKENIZER).mkdir(parents=True, exist_ok=True)
            write_bytes(target / TOKENIZER / file.name, file.read_bytes())


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; 0. ValueError, OSError naming the pair that cannot be."""
    args = parse_args(argv)
    folder, out = data_folder(here(args.input, "IN")), here(args.output, "OUT")
    inside = [path.resolve() for path in (folder, out)]
    if inside[0] in (inside[1], *inside[1].parents) or inside[1] in inside[0].parents:
        raise ValueError(f"OUT {out}: it is IN, or one lies in the other; name another folder")
    data_format = next(f for f in TARGETS.values() if f != TARGETS[args.to])
    files = find_files(args.input, data_format)
    check_format(folder, files, data_format)
    copy_tokenizer(folder, out)
    folders: dict[Path, dict[str, dict[str, Any]]] = {}
    with tqdm(total=sum(f.stat().st_size for f in files), unit="B", unit_scale=True, disable=None) as bar:
        for source in files:
            target = out / source.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            manifest = read_manifest(source.parent)
            record = None if manifest is None else manifest["shards"].get(source.stem)
            done = finished(source, target, args.to)
            if done is None:
                (target.parent / MANIFEST_NAME).unlink(missing_ok=True)
                listed = manifest if record is not None else None
                done = convert(source, target, to=args.to, record=record, ends_follow=ends_follow(listed),
                               eod=args.eod if listed is None else listed["tokenizer"]["eod"])
            folders.setdefault(source.parent, {})[source.stem] = done
            bar.update(source.stat().st_size)
    for source_folder, done_there in folders.items():
        write_manifest(source_folder, out / source_folder.relative_to(folder), done_there, args.to)
    print(f"{out}: {len(files):,} pairs of --data-format {TARGETS[args.to]}")
    return 0


if __name__ == "__main__":
    run_main(main)
