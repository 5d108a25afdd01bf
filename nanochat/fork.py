"""
Forks: a new run that continues another one from any step, and differs from it in nothing but what
its command line changes.

    parent   0 ------- 500 ------- 1000 ...
    child              500 ------- 1000 ...    --fork-from=parent@500 --model-tag=child --matrix-lr=0.01

A fork is a run directory whose first checkpoint is the parent's. It takes over everything: weights,
optimizer state, position in the schedule, cursors, counters, random states. Then it resumes like
any other run, and its steps are numbered on. So a fork that changes nothing repeats its parent bit
for bit, and deleting the parent does no harm.

    flags       the parent's config.json is read like a --config file; the command line follows it
    settings    `branch_off` refuses what cannot change, and records what does, also in the model's code
    files       `files_of_fork`: those that the parent reads stay pinned, further ones join
    cursors     `continue_cursors`: each bucket continues where it was

**What may change.** Everything but the shape of the model, its tokenizer, the lanes, the seed, and
how documents are selected. With another length of rows or another packing, documents that were
waiting in a buffer are packed anew, and the counts of the ledger (nanochat/stream.py) start with them.

`run_dir.Fork` is the record in config.json, from which schedules and plans count on.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanochat.checkpoint import SCHEDULER_NAME, Checkpoint, find_checkpoint
from nanochat.common import (
    AnyPath,
    Difference,
    as_path,
    differences,
    hash_json,
    is_remote,
    print0,
)
from nanochat.config import (
    OF_LAUNCH,
    OF_ONE_RUN,
    OF_ROWS,
    Settings,
    changes_of,
    check_kept,
    fields_of,
)
from nanochat.files import data_at, fixed_paths, list_files
from nanochat.gpt import GPTConfig
from nanochat.model_code import code_changes, code_now
from nanochat.order import StreamConfig, open_order
from nanochat.pins import (
    DATA_MANIFEST,
    Manifest,
    Manifests,
    Pin,
    bare,
    contents_of,
    keep_groups,
    leave_out,
    pins_of,
    read_manifests,
)
from nanochat.run_dir import (
    CONFIG_NAME,
    Fork,
    changes_text,
    config_at,
    is_run_dir,
    read_config,
)
from nanochat.run_order import order_of, stream_config
from nanochat.schedule import Horizon, Schedule
from nanochat.sources import RunData, Source, check_files
from nanochat.stream import AnyStreamConfig, Cursor, stream_identity

# settings that follow from the machine
MACHINE = ("world_size", "cpu_threads", "device_type")
# settings that decide the length of a run
LENGTH = ("num_iterations", "target_flops", "target_param_data_ratio", "curriculum")


@dataclass(frozen=True)
class Parent:
    """The run that a new run continues."""

    run_dir: Path
    settings: Settings
    checkpoint: Checkpoint
    manifests: Manifests


# ---- settings ------------------------------------------------------------------------------------


def _settings_at(run_dir: Path, step: int) -> Settings:
    """The settings with which a run took a step, but the places where it has read its data last."""
    settings = Settings.from_json(config_at(run_dir, step), run_dir / CONFIG_NAME)
    newest = config_at(run_dir, math.inf)
    return replace(settings, data_path=newest.get("data_path"), val_path=newest.get("val_path"))


def find_parent(fork_from: str) -> Parent:
    """The run and the checkpoint that --fork-from names. FileNotFoundError or ValueError if it
    cannot be continued."""
    checkpoint = find_checkpoint(fork_from)
    run_dir = checkpoint.path.absolute().parent.parent
    if not is_run_dir(run_dir):
        raise ValueError(
            f"--fork-from={fork_from}: {checkpoint.path} is not in the folder of a run, whose settings "
            f"and files a fork needs; name a run, or use --init-from for the weights alone"
        )
    checkpoint.check_trained()
    manifests = read_manifests(run_dir / DATA_MANIFEST)
    return Parent(run_dir, _settings_at(run_dir, checkpoint.step), checkpoint, manifests)


def branch_off(settings: Settings, parent: Parent) -> Settings:
    """The settings of a fork, with its record. ValueError if they change what a fork keeps, or if
    the fork would do nothing."""
    checkpoint = parent.checkpoint
    known = settings.fork or {}
    if "checksum" in known:
        begun = Fork(**known)
        if begun.checksum != checkpoint.seal["checksum"]:
            raise ValueError(
                f"--fork-from={settings.fork_from}: this run began with step {begun.step} of {begun.run}, but "
                f"{checkpoint.path} is now a different checkpoint; restore the old one, or start a new run with "
                f"--model-tag=NAME"
            )
        return settings  # it has not saved yet; all else was decided when it began
    settings = _reads_where_parent_does(_inherit(settings, parent), parent)
    changes = _changes(settings, parent)
    _check_halt(settings, parent, changes)
    tokens = checkpoint.seal["progress"]["tokens"]
    earlier = Fork.of(parent.settings.fork)
    mix_tokens = earlier.mix_tokens if earlier else 0
    if "curriculum" in changes:
        mix_tokens = tokens
    fork = Fork(
        run=parent.run_dir.name,
        checkpoint=checkpoint.path.name,
        step=checkpoint.step,
        tokens=tokens,
        checksum=checkpoint.seal["checksum"],
        changes=changes,
        mix_tokens=mix_tokens,
        share_limit=_share_limit(settings, parent),
    )
    if not changes.keys() & {*LENGTH, "total_batch_size"}:
        # the parent may have been extended since it started
        steps = checkpoint.load(SCHEDULER_NAME).get("num_iterations")
        derived = read_config(parent.run_dir)["derived"]["num_iterations"]
        if steps != derived:
            settings = replace(settings, num_iterations=steps)
    return replace(settings, fork=fork._asdict())


def note_length(settings: Settings, parent: Parent, num_iterations: int) -> Settings:
    """The settings of a fork of `num_iterations` steps. Its record names the length if and only if
    it is not the parent's, because that changes the schedules, and may follow from another setting:
    from the curriculum, say."""
    fork = Fork.of(settings.fork)
    assert fork is not None
    # the length that the parent had at this step
    length = parent.checkpoint.load(SCHEDULER_NAME).get("num_iterations")
    if length is None:
        return settings
    changes = {name: change for name, change in fork.changes.items() if name != "num_iterations"}
    if length != num_iterations:
        changes["num_iterations"] = [length, num_iterations]
    return replace(settings, fork=fork._replace(changes=changes)._asdict())


def rate_jump(
    settings: Settings, parent: Parent, checkpoint: Checkpoint, horizon: Horizon
) -> tuple[float, float] | None:
    """The multipliers of the learning rates in the last step of a new fork's parent and in its own
    first one, if they more than double; else None."""
    length = parent.checkpoint.load(SCHEDULER_NAME).get("num_iterations")
    if length is None or checkpoint.step == 0:
        return None
    peak = horizon.weight_decay_scaled
    theirs = Schedule.of(parent.settings, length, peak_weight_decay=peak)
    ours = Schedule.of(settings, horizon.num_iterations, peak_weight_decay=peak)
    before = theirs.lr(checkpoint.step - 1)
    after = ours.lr(checkpoint.step)
    return (before, after) if after > 2 * before else None


def _check_halt(settings: Settings, parent: Parent, changes: Mapping[str, Any]) -> None:
    """ValueError if the parent halted, and these changes do not lift that."""
    seal = parent.checkpoint.seal
    lifts = {"data_path", "allow_bucket_exhaustion", *OF_ROWS} & changes.keys()
    if seal.get("status") == "halted" and not lifts:
        others = "" if seal.get("all_dry") else ", or add --allow-bucket-exhaustion"
        raise ValueError(
            f"--fork-from={settings.fork_from}: {parent.run_dir.name} halted: {seal['halted']}; a fork "
            f"that reads the same data halts there, too. Change --curriculum or --data-path{others}"
        )


def _share_limit(settings: Settings, parent: Parent) -> int | None:
    """The `share_limit` of a fork: lanes keep the shares of the data that the parent gave them, even
    if the fork's settings imply others."""
    before = stream_config(parent.settings)
    after = stream_config(replace(settings, fork=parent.settings.fork))
    if not isinstance(before, StreamConfig) or not isinstance(after, StreamConfig):
        return None  # an order of samples
    if before.tokens_in_shares != after.tokens_in_shares:
        return before.tokens_in_shares or 0
    return before.share_limit


def _inherit(settings: Settings, parent: Parent) -> Settings:
    """The settings with those of the parent that no flag names, such as those that an order of its
    own works out."""
    values = {}
    for name, f in fields_of(type(settings)).items():
        is_hidden = f.metadata.get("auto") and not f.metadata.get("flag", True)
        if is_hidden and name not in OF_ONE_RUN and hasattr(parent.settings, name):
            values[name] = getattr(parent.settings, name)
    return replace(settings, **values)


def _reads_where_parent_does(settings: Settings, parent: Parent) -> Settings:
    """The settings with the folder in which the parent's files are pinned, if its data path names
    that folder, but from another one than the present one. Lists and prefixes stay as they are."""
    path = settings.data_path
    named = (settings.fork or {}).get("named", ())
    if path is None or "data_path" in named or is_remote(path):
        return settings
    data = data_at(path)
    if data.files or data.folder.exists():
        return settings
    roots = {manifest["root"] for manifest in parent.manifests["train"].values()}
    is_folder = len(roots) == 1 and Path(*roots).name == data.folder.name
    return replace(settings, data_path=roots.pop()) if is_folder else settings


def _changes(settings: Settings, parent: Parent) -> dict[str, list[Any]]:
    """{setting or model code: [parent's value, fork's value]}. ValueError lists those that a fork keeps."""
    if type(settings) is not type(parent.settings):
        raise ValueError(
            f"--order={settings.order}: {parent.run_dir.name} has --order={parent.settings.order}, and "
            f"a fork keeps its parent's order"
        )
    then, now = parent.settings.to_json(), settings.to_json()
    named = (settings.fork or {}).get("named", ())
    changes: dict[str, list[Any]] = {}
    for name in fields_of(type(settings)):
        if name in (*OF_ONE_RUN, *OF_LAUNCH, *MACHINE):
            continue
        if name in ("data_path", "val_path") and _is_same_state(then[name], now[name]):
            continue  # another name of it
        before, after = then[name], now[name]
        # files may join the data that a command names, even if it is the parent's
        differs = name in named if name == "data_path" else changes_of(name, before, after)
        if differs:
            changes[name] = [before, after]
    assert settings.fork_from is not None
    check_kept(settings.fork_from, then, now)
    if settings.skip_steps:
        changes["skip_steps"] = [0, settings.skip_steps]
    code = parent.checkpoint.seal.get("model_code", {})
    return changes | code_changes(code, code_now(code))


def _is_same_state(then: str | None, now: str | None) -> bool:
    """Whether two data paths stand for the same commits, to which no file can be added."""
    if then is None or now is None:
        return False
    before = fixed_paths(then)
    return before is not None and before == fixed_paths(now)


def first_checkpoint(parent: Parent, settings: Settings, model_config: GPTConfig) -> Checkpoint:
    """The parent's checkpoint as the first one of the fork."""
    checkpoint = parent.checkpoint
    fork = Fork.of(settings.fork)
    assert fork is not None
    shape = {**checkpoint.model_config, "sequence_len": model_config.sequence_len}
    seal = {
        name: value
        for name, value in checkpoint.seal.items()
        if name not in ("wandb_id", "halted", "all_dry", "by_time", "replayed")
    }
    # kept, because its steps are replayed from there
    seal |= {
        "status": "running",
        "kept": True,
        "K": settings.leaves,
        "architecture_hash": hash_json(shape),
        # a result of its parent is none of its own
        "progress": {**checkpoint.seal["progress"], "val_bpb": None},
    }
    rows = {*OF_ROWS, "total_batch_size", "pack", "data_path", "without_documents", "skip_steps"}
    if rows & fork.changes.keys():
        seal["next_digest"] = None
    return replace(checkpoint, model_config=shape, seal=seal)


def describe_fork(fork: Fork) -> str:
    """What a fork continues, and what it changes, as a sentence."""
    return f"continues {fork.run} at step {fork.step:,}; {changes_text(fork.changes)}"


# ---- files ---------------------------------------------------------------------------------------


def _validation_of(parent: Parent, folder: AnyPath) -> dict[str, Manifest]:
    """The parent's validation files; those below `folder`, if all were moved there. FileNotFoundError
    or ValueError names a file that is gone or has changed."""
    val = parent.manifests["val"]
    here = []
    there = []
    for manifest in val.values():
        root = as_path(manifest["root"])
        for entry in manifest["files"]:
            here.append((root / entry["name"]).exists())
            there.append((folder / entry["name"]).exists())
    is_moved = not any(here) and all(there)
    return check_files({"train": {}, "val": val}, None, folder if is_moved else None)["val"]


def files_of_fork(parent: Parent, settings: Settings) -> Manifests:
    """The manifests of a new fork.

    The files of the parent stay as they were pinned, and those of validation, too. If the command
    names --data-path, files that the parent did not read join their bucket; and a bucket without
    any of the parent's files begins anew. FileNotFoundError or ValueError names a file of the
    parent that is gone or has changed.
    """
    fork = Fork.of(settings.fork)
    assert fork is not None
    order = order_of(settings)
    if not order.feeds_lanes:  # an order of samples: all of its files, which may have moved
        return check_files(parent.manifests, data_at(settings.data_path or "").folder)
    if not {"data_path", "val_path", "curriculum"} & fork.changes.keys():
        same = check_files(parent.manifests, strict=settings.strict)
        if "without_documents" in fork.changes:
            whole = bare(same["train"])
            listed = settings.without_documents
            same["train"] = whole if listed is None else leave_out(whole, listed)
        return same
    data = data_at(settings.data_path or "")
    list_files(data, settings.data_format)  # a path that names nothing is an error of its own
    val: dict[str, Manifest] = {}
    if "val_path" not in fork.changes:
        val = _validation_of(parent, data.folder)
    evaluated = []  # the files of validation, which are no training data
    if val and settings.val_fraction == 0:
        entries = [entry for manifest in val.values() for entry in manifest["files"]]
        evaluated = [contents_of(entry) for entry in entries]
        # with a validation file, all others are for training
        file = Path(next(iter(val.values()))["root"], entries[0]["name"])
        settings = replace(settings, val_path=str(file))
    pinned = order.pin(settings)
    train: dict[str, Manifest] = {}
    for bucket, manifest in pinned["train"].items():
        theirs = parent.manifests["train"].get(bucket)
        read_before = theirs["files"] if theirs is not None else []
        files = _training_files(manifest, read_before, evaluated)
        ours: Manifest = {**manifest, "files": files}
        continues = {entry["name"] for entry in files} & {entry["name"] for entry in read_before}
        if theirs is not None and continues:
            joins = "data_path" in fork.changes
            feeds = [cursor["buckets"][bucket] for cursor in parent.checkpoint.cursors]
            begins = [[feed["epoch"], feed["place"]] for feed in feeds]
            ours = _joined(ours, theirs, fork.run, begins if joins else None)
        train[bucket] = ours
    return {"train": train, "val": val or pinned["val"]}


def _training_files(
    manifest: Manifest, read_before: Sequence[Pin], evaluated: Container[object]
) -> list[Pin]:
    """The files of a bucket that are no validation files (`evaluated`: the contents of these). What
    the parent trains on (`read_before`) stays, even if it is a copy of a validation file."""
    files = [entry for entry in manifest["files"] if contents_of(entry) not in evaluated]
    names = {entry["name"] for entry in files}
    for entry in read_before:
        is_copy = contents_of(entry) in evaluated and entry["name"] not in names
        if is_copy and (as_path(manifest["root"]) / entry["name"]).exists():
            files.append(entry)
            names.add(entry["name"])
    return files


def _joined(
    manifest: Manifest, theirs: Manifest, run: str, begins: list[list[int]] | None
) -> Manifest:
    """The manifest of a bucket that the parent `run` reads, too: the parent's files and then, if
    files may join, the others. `begins`: see `order.Joined`; None: no file may join."""
    found = {entry["name"]: entry for entry in manifest["files"]}
    files = []
    for entry in theirs["files"]:
        place = "" if manifest["root"] == theirs["root"] else f" in {theirs['root']}"
        own = found.pop(entry["name"], None)
        if own is None:
            raise FileNotFoundError(
                f"{manifest['root']}/{entry['name']}: missing or validation data, but {run} trains on the file of "
                f"this name{place}; name data that has all files of the parent, or none, with --data-path, or other "
                f"validation data with --val-path"
            )
        own = keep_groups(own, entry)
        if pins_of(own) != pins_of(entry):
            raise ValueError(
                f"{manifest['root']}/{entry['name']}: {run} read another file of this name{place}; name that one "
                f"with --data-path, or give this one another name"
            )
        files.append(own)
    joined: Manifest = {**manifest, "files": files}
    if "joined" in theirs:
        joined["joined"] = theirs["joined"]
    arrived = [*found.values()]
    if arrived and begins is not None:
        joined["files"] = [*files, *arrived]
        joined["joined"] = [*theirs.get("joined", []), {"files": len(files), "begins": begins}]
    return joined


# ---- cursors -------------------------------------------------------------------------------------


def continue_cursors(
    parent: Parent, settings: Settings, config: AnyStreamConfig, data: RunData
) -> list[Cursor]:
    """The cursors with which a fork begins to read. ValueError if its order cannot continue there.

    Each bucket continues where it was, and new ones start from their beginning. A new curriculum
    starts with its first phase.
    """
    fork = Fork.of(settings.fork)
    assert fork is not None
    cursors = parent.checkpoint.cursors
    before = stream_config(parent.settings)
    identity = stream_identity(config, data.train, data.tokenizer.fingerprint)
    if not isinstance(config, StreamConfig) or not isinstance(before, StreamConfig):
        return list(cursors)  # an order of samples: equal in all that decides them
    _check_order(settings, before, config, differences(cursors[0]["stream"], identity))
    theirs = parent.manifests["train"]
    ours = data.manifests["train"]
    going_on = [bucket for bucket in data.train if _goes_on(theirs.get(bucket), ours[bucket])]
    _tell(
        fork.run,
        left=sorted(theirs.keys() - {*going_on}),
        new=sorted(data.train.keys() - {*going_on}),
    )
    same_mix = "curriculum" not in fork.changes
    same_data = all(
        cursors[0]["stream"].get(name) == identity[name]
        for name in identity
        if name.startswith("data ")
    )

    continued = []
    num_lost = 0  # tokens
    for cursor in cursors:
        feeds = {}
        for bucket, feed in cursor["buckets"].items():
            if bucket not in going_on:
                continue
            begins = dict(feed)
            if fork.packs_anew:
                begins = pack_anew(feed, before, config)
                num_lost += begins["cropped"]
            if len(ours[bucket].get("joined", ())) > len(theirs[bucket].get("joined", ())):
                source = data.train[bucket]
                begins["place"] = _begin_of_share(source, bucket, config, cursor["lane"], feed)
            feeds[bucket] = begins
        row = cursor["row"] * before.T // config.T if same_mix else 0
        dropped = cursor["dropped"] if same_mix and same_data else []
        continued.append(
            {**cursor, "stream": identity, "row": row, "dropped": dropped, "buckets": feeds}
        )
    if num_lost:
        print0(
            f"note: {num_lost:,} tokens are in no row of the fork, and count as cropped: the rest of documents that "
            f"{fork.run} has begun; they go on only if both runs split long documents, or both use --packing=concat"
        )
    return continued


def _tell(run: str, *, left: list[str], new: list[str]) -> None:
    """Print which buckets a fork does not go on with, because nothing else would show it."""
    if left:
        print0(
            f"note: {', '.join(left)}: {run} read this, and the fork does not go on with it; documents that were "
            f"pending there are in no row of the fork"
        )
    if new:
        print0(
            f"note: {', '.join(new)}: the fork reads this from its beginning, including what {run} may have "
            f"read under another name"
        )


def _check_order(
    settings: Settings,
    before: StreamConfig,
    config: StreamConfig,
    differing: Sequence[Difference],
) -> None:
    """ValueError if a fork cannot continue the order of its parent. `differing`: what differs
    in the identities of their streams."""
    packing = {"T", "layout", "long_docs", "overlap"}
    may_differ = {*packing, "buffer_size", "pack", "curriculum", "share_limit"}
    for name, was, now in differing:
        if name not in may_differ and not name.startswith("data "):
            raise ValueError(
                f"--fork-from={settings.fork_from}: {name} was {was}, now {now}, which a fork keeps; use "
                f"--init-from={settings.fork_from} for the weights alone"
            )
    if before.framed != config.framed:
        raise ValueError(
            f"--packing={config.layout}: a fork of a run with --packing={before.layout} cannot use it, "
            f"because binned rows hold documents as they are stored, and others add BOS; use "
            f"--init-from={settings.fork_from} for the weights alone"
        )


def _begin_of_share(
    source: Source, bucket: str, config: StreamConfig, lane: int, feed: Mapping[str, Any]
) -> int:
    """Where a lane's documents begin in the current epoch of a bucket that files have just joined."""
    order = open_order(source, bucket=bucket, config=config)
    return order.share(lane, feed["epoch"]).start


def _goes_on(theirs: Manifest | None, ours: Manifest) -> bool:
    """Whether a bucket of a fork begins with the files that its parent reads."""
    if theirs is None:
        return False
    common = zip(theirs["files"], ours["files"])
    same = [pins_of(mine) == pins_of(their) for their, mine in common]
    return len(same) == len(theirs["files"]) and all(same)


def pack_anew(
    feed: Mapping[str, Any], before: StreamConfig, config: StreamConfig
) -> dict[str, Any]:
    """A feed's part of a cursor for another length of rows or another packing: the documents that
    were pending arrive again, in the order of their arrival, and the ledger starts with them.

    The tail of a cut document stays one if both packings split documents. Otherwise it is dropped,
    and counts as cropped.
    """
    packer = config.new_packer()
    splits = [c.layout == "bestfit" and c.long_docs == "split" for c in (before, config)]
    read = documents = 0
    # the clock says when pieces arrived; those of `concat` are in order
    for epoch, group, number, length, start, _ in sorted(
        feed["waiting"], key=lambda piece: piece[5]
    ):
        key = (epoch, group, number)
        num_bos = 1 if config.framed else 0
        documents += 1
        if start == 0:
            packer.push(key, length)
            packer.inserted += num_bos
            read += length - num_bos
            continue
        if before.layout == config.layout == "concat":
            packer.push(key, length, start)  # its token `start` is the next row's first
            read += length - start
            continue
        context = min(before.overlap, start - 1) if splits[0] else 0
        rest = length - (1 + context if splits[0] else start + 1)
        read += rest
        if all(splits):
            packer.push(key, 1 + min(config.overlap, start - 1) + rest, start)
        else:
            packer.cropped += rest
    counts, waiting = packer.state()
    pieces = [[*key, *piece] for key, piece in waiting.items()]
    kept = {"epoch": feed["epoch"], "place": feed["place"]}
    return {**kept, "documents": documents, "read": read, **counts, "waiting": pieces}
