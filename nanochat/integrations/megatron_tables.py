"""The tables of Megatron's order, pure functions of integers, weights and lengths; and the index
cache on disk. `nanochat/integrations/megatron.py` and `megatron_order.py` use them.

    document_index, shuffle_index             two shuffles of a range                 `Shuffles.tables`
    sample_index                              where samples begin in the documents    `find_samples`
    dataset_index, dataset_sample_index       the source of each sample               `blend_sources`

A **blend** follows a recurrence. Before sample i, every source has a deficit: its weight times i,
minus the number of samples taken from it. Sample i comes from the source with the greatest deficit
(the first one if several are equal; in float64; i = 0 counts as 1):

    i                      0     1     2     3     4     5       weights 0.5, 0.3, 0.2
    deficits             0.5  -0.5     0   0.5     0   0.5
                         0.3   0.3  -0.4  -0.1   0.2  -0.5
                         0.2   0.2   0.4  -0.4  -0.2     0
    dataset_index          0     1     2     0     1     0       the source of sample i
    dataset_sample_index   0     0     0     1     1     2       and its number there

Without weights the lengths are the weights, and a source leaves the blend after its last sample.

The rules (how many epochs, when the last one is shuffled separately, how a partial sample is
counted), all elements and their types are those of megatron-core 0.16.1.
"""

import logging
from array import array as growing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat.common import atomic_open, hash_file, read_json, write_json

log = logging.getLogger(__name__)

APART = 0.80  # the last epoch is shuffled separately if less than this share of it is needed
WORTH_STORING = 1 << 19  # table entries; computing fewer takes no longer than opening files

Arrays = dict[str, np.ndarray]


# ---- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shuffles:
    """The numbers that determine the two shuffles of a data set."""

    seed: int
    first: int  # sequences first .. last - 1
    last: int
    num_epochs: int
    apart: bool  # whether the last epoch is shuffled separately
    # samples that end before the last epoch; with `apart` they are shuffled separately, too
    samples_before: int
    num_samples: int

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """(document_index (epochs * sequences,) int32, shuffle_index (samples,) uint32)."""
        n = self.last - self.first
        documents = np.tile(np.arange(self.first, self.last, dtype=np.int32), self.num_epochs)
        narrow = self.num_samples < 2**32 - 2
        samples = np.arange(self.num_samples, dtype=np.uint32 if narrow else np.int64)
        state = np.random.RandomState(self.seed)
        parts = [documents, samples]
        if self.apart:
            parts = [
                *np.split(documents, [len(documents) - n]),
                *np.split(samples, [self.samples_before]),
            ]
        for part in parts:
            state.shuffle(part)  # in place: a part is a view
        return documents, samples


def plan_order(
    seed: int,
    documents: range,
    *,
    tokens: int,
    num_samples: int | None,
    T: int,
    extra: bool,
    drop_last: bool,
) -> Shuffles:
    """The shuffles for `num_samples` samples from sequences with `tokens` tokens per epoch, over as
    many epochs as they need (None: one epoch)."""
    epochs = -(-(num_samples * T + extra) // tokens) if num_samples else 1
    before = max(0, (epochs - 1) * tokens - extra) // T
    apart = epochs > 1 and (num_samples or 0) - before < int(APART * ((tokens - extra) // T))
    targets = epochs * tokens - extra
    total = max(0, targets // T)
    if not drop_last:  # megatron-core counts a last partial sample in float32
        total = max(0, int(np.ceil(np.float32(targets) / np.float32(T))))
    return Shuffles(seed, documents.start, documents.stop, epochs, apart, before, total)


def find_samples(
    lengths: np.ndarray,
    documents: np.ndarray,
    *,
    num_samples: int,
    tokens: int,
    T: int,
    extra: bool,
) -> np.ndarray:
    """sample_index, (samples + 1, 2): where each sample of the stream begins, (place in
    `documents`, offset).

    `lengths` are those of all sequences, `tokens` is the number of tokens in the stream. Sample k
    begins at token kT. Without the extra token it begins after token kT - 1, which may be the end
    of a document. The place after a partial last sample is the end of the stream.
    """
    wide = len(documents) > np.iinfo(np.int32).max
    index = np.zeros((num_samples + 1, 2), np.int64 if wide else np.int32)
    sizes = lengths[documents].astype(np.int64)
    ends = np.cumsum(sizes)
    begins = np.minimum(np.arange(1, num_samples + 1) * T, tokens - extra)
    places = np.searchsorted(ends, begins, "right" if extra else "left")
    index[1:, 0] = places  # sample 0 begins at (0, 0), even if document 0 is empty
    index[1:, 1] = begins - (ends[places] - sizes[places])
    if not extra and len(documents):
        index[1 + tokens // T :] = len(documents) - 1, lengths[documents[-1]]
    return index


def blend_sources(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> Arrays:
    """The source of each of `size` samples, dataset_index (size,) int16, and the number of the
    sample in that source, dataset_sample_index (size,) int64. ValueError for more than 32,767
    sources.

    `weights` (k,) add up to 1. `limits` (k,): the number of samples after which a source leaves the
    blend; None: none leaves. A sample takes about a microsecond for any k.
    """
    # dataset_index is int16, in megatron-core's files too
    if len(weights) > np.iinfo(np.int16).max:
        raise ValueError(
            f"blend: got {len(weights):,} sources, expected at most {np.iinfo(np.int16).max:,}; "
            f"merge some files"
        )
    shares = np.array(weights, np.float64)
    counts = np.zeros(len(weights))
    chosen = growing("h")
    for first in range(0, size, 256):
        i = np.arange(first, min(first + 256, size), dtype=np.float64)
        for due in np.multiply.outer(np.maximum(i, 1), shares):
            source = int((due - counts).argmax())
            counts[source] += 1
            chosen.append(source)
            if limits is not None and counts[source] == limits[source]:
                counts[source] = np.inf
    sources, samples = np.array(chosen, np.int16), np.empty(size, np.int64)
    for source in range(len(weights)):
        of_source = np.flatnonzero(sources == source)
        samples[of_source] = np.arange(len(of_source))
    return {"dataset_index": sources, "dataset_sample_index": samples}


# ---- the cache ----------------------------------------------------------------------------------


def cached(folder: str | None, name: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` returns, memory-mapped from FOLDER/<name>-<array>.npy. If these files
    do not exist, the arrays are built, and stored if they have enough entries.

    `name` contains a hash of everything that the arrays depend on, so every process writes the same
    bytes. That makes many processes on many nodes safe without a lock: each builds missing arrays
    and renames its own copy into place. <name>.json is written last and has the files' checksums,
    which are verified each time it is opened; corrupt arrays are built again, with a warning.
    Rejected: rank 0 builds and the others wait at a barrier, as in megatron-core. That ends in a
    timeout if rank 0 takes long, or if the file system is slow to show the file.
    """
    if folder is None:
        return build()
    seal = Path(folder) / f"{name}.json"
    if seal.exists():
        try:
            return _open_sealed(seal)
        except (OSError, ValueError) as e:
            log.warning("%s: cannot be used (%s); building it again", seal, e)
    arrays = build()
    if sum(array.size for array in arrays.values()) < WORTH_STORING:
        return arrays
    try:
        seal.parent.mkdir(parents=True, exist_ok=True)
        checksums = {}
        for which, array in arrays.items():
            path = seal.with_name(f"{name}-{which}.npy")
            with atomic_open(path) as f:
                np.save(f, array, allow_pickle=False)
            checksums[which] = hash_file(path)
        write_json(seal, checksums)
        return _open_sealed(seal)
    except OSError as e:
        log.warning("%s: not stored (%s); the next launch builds it again", seal, e)
        return arrays


def _open_sealed(seal: Path) -> Arrays:
    """The arrays beside <name>.json, memory-mapped. ValueError or OSError if one is missing or
    corrupt."""
    arrays = {}
    for which, checksum in read_json(seal, dict).items():
        path = seal.with_name(f"{seal.stem}-{which}.npy")
        if hash_file(path) != checksum:
            raise ValueError(f"{path.name}: wrong checksum")
        arrays[which] = np.load(path, mmap_mode="r", allow_pickle=False)
    if not arrays:
        raise ValueError("it names no array")
    return arrays
