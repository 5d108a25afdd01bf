"""
The tables of Megatron's order, pure functions of integers, weights and lengths; and their cache.

    document_index, shuffle_index    two shuffles of a range               `Shuffles.shuffled`
    sample_index                     where in the documents samples begin  `find_samples`
    dataset_index and its numbers    which source gives a sample           `blend_sources`

A **blend** is a recurrence. Before each sample every source has a deficit: its weight times i,
minus the samples that it gave. The source with the greatest deficit gives sample i (the first of
equals, in float64; i = 0 counts as 1):

    i                      0     1     2     3     4     5       weights 0.5, 0.3, 0.2
    deficits             0.5  -0.5     0   0.5     0   0.5
                         0.3   0.3  -0.4  -0.1   0.2  -0.5
                         0.2   0.2   0.4  -0.4  -0.2     0
    dataset_index          0     1     2     0     1     0       which source gives sample i
    dataset_sample_index   0     0     0     1     1     2       and which of its samples that is

Without weights the lengths are the weights, and a source that has given all is out.

The rules (how many epochs, when the last one is shuffled apart, how a partial sample is counted)
are those of megatron-core 0.16.1, and so is every element and type.
"""

import logging
from array import array as growing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat.common import atomic_open, hash_file, read_json, write_json

log = logging.getLogger(__name__)

APART = 0.80  # the last epoch is shuffled apart when less than this share of it is needed
WORTH_STORING = 1 << 19  # entries of tables; fewer are computed as fast as files are opened

Arrays = dict[str, np.ndarray]


# ---- tables -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Shuffles:
    """All that the two shuffles of a data set depend on."""

    seed: int
    first: int  # sequences first .. last - 1
    last: int
    num_epochs: int
    apart: bool  # whether the last epoch is shuffled apart
    samples_before: int  # samples that end before the last epoch; then they are shuffled apart too
    num_samples: int

    def shuffled(self) -> tuple[np.ndarray, np.ndarray]:
        """(document_index (epochs * sequences,) int32, shuffle_index (samples,) uint32)."""
        n = self.last - self.first
        documents = np.tile(np.arange(self.first, self.last, dtype=np.int32), self.num_epochs)
        narrow = self.num_samples < 2**32 - 2
        samples = np.arange(self.num_samples, dtype=np.uint32 if narrow else np.int64)
        state = np.random.RandomState(self.seed)
        for array, edge in ((documents, len(documents) - n), (samples, self.samples_before)):
            for part in (array[:edge], array[edge:]) if self.apart else (array,):
                state.shuffle(part)  # in place: a part is a view
        return documents, samples


def plan_order(seed: int, documents: range, *, tokens: int, num_samples: int | None, T: int,
               extra: bool, drop_last: bool) -> Shuffles:
    """How many epochs of `tokens` tokens it takes for `num_samples` samples (None: one epoch), and
    whether the last one is shuffled apart. ValueError if there are no tokens to take them from."""
    wanted, epochs = num_samples or 0, 1
    if wanted:
        if not tokens:
            raise ValueError(f"{wanted:,} samples of {len(documents):,} sequences without a token; "
                             f"give this split more of the data, or ask for no samples")
        epochs = -(-(wanted * T + extra) // tokens)
    before = max(0, (epochs - 1) * tokens - extra) // T
    apart = epochs > 1 and wanted - before < int(APART * ((tokens - extra) // T))
    targets = epochs * tokens - extra
    total = max(0, targets // T)
    if not drop_last:  # megatron-core counts a last partial sample in float32
        total = max(0, int(np.ceil(np.float32(targets) / np.float32(T))))
    return Shuffles(seed, documents.start, documents.stop, epochs, apart, before, total)


def find_samples(lengths: np.ndarray, documents: np.ndarray, *, num_samples: int, tokens: int,
                 T: int, extra: bool) -> np.ndarray:
    """sample_index, (samples + 1, 2): where each sample of the stream begins, (place in
    `documents`, offset).

    `lengths` are those of all sequences, `tokens` is how many there are in the stream. Sample k
    begins at token kT. Without the extra token it begins behind token kT - 1, which may be the end
    of a document. What would begin behind the last token, as after a partial sample, begins there.
    """
    wide = len(documents) > np.iinfo(np.int32).max
    found = np.zeros((num_samples + 1, 2), np.int64 if wide else np.int32)
    sizes = lengths[documents].astype(np.int64)
    ends = np.cumsum(sizes)
    begins = np.minimum(np.arange(1, num_samples + 1) * T, tokens - extra)
    places = np.searchsorted(ends, begins, "right" if extra else "left")
    found[1:, 0] = places  # sample 0 begins at (0, 0), whatever document 0 is
    found[1:, 1] = begins - (ends[places] - sizes[places])
    if not extra and len(documents):
        found[1 + tokens // T:] = len(documents) - 1, lengths[documents[-1]]
    return found


def blend_sources(weights: Sequence[float], size: int,
                  limits: Sequence[int] | None = None) -> Arrays:
    """Which source gives each of `size` samples, dataset_index (size,) int16, and which of its own
    samples that is, dataset_sample_index (size,) int64. ValueError for more sources than 32,767.

    `weights` (k,) add up to 1. `limits` (k,): samples after which a source is out; None: no end.
    A sample takes about a microsecond, whatever k is.
    """
    if len(weights) > np.iinfo(np.int16).max:  # dataset_index is int16, in megatron-core's files too
        raise ValueError(f"blend: got {len(weights):,} sources, expected at most {np.iinfo(np.int16).max:,}; put "
                         f"several into one file")
    shares, counts, chosen = np.array(weights, np.float64), np.zeros(len(weights)), growing("h")
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
        own = np.flatnonzero(sources == source)
        samples[own] = np.arange(len(own))
    return {"dataset_index": sources, "dataset_sample_index": samples}


# ---- the cache ----------------------------------------------------------------------------------

def cached(folder: str | None, name: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` makes: mapped from FOLDER/<name>-<array>.npy, or made, and written there
    if they have enough entries to be worth it.

    `name` holds a hash of everything that the arrays are computed from, so whoever writes a file
    writes the same bytes. That makes many processes on many nodes safe without a lock: each looks,
    makes what is absent, and renames its own copy into place. <name>.json is written last and has
    the files' checksums, which are compared at every opening; what is damaged is told and made again.
    Rejected: rank 0 builds and the others wait at a barrier, as megatron-core does. That ends in a
    time-out where rank 0 takes long, or where the file system is slow to show the file.
    """
    if folder is None:
        return build()
    seal = Path(folder) / f"{name}.json"
    if seal.exists():
        try:
            return _open_sealed(seal)
        except (OSError, ValueError) as e:
            log.warning("%s: cannot be used (%s); it is made again", seal, e)
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
        log.warning("%s: not stored (%s); it will be made again next time", seal, e)
        return arrays


def _open_sealed(seal: Path) -> Arrays:
    """The arrays beside <name>.json, mapped. ValueError, OSError if they are not what it says."""
    arrays = {}
    for which, checksum in read_json(seal, dict).items():
        path = seal.with_name(f"{seal.stem}-{which}.npy")
        if hash_file(path) != checksum:
            raise ValueError(f"{path.name} is not what its checksum says")
        arrays[which] = np.load(path, mmap_mode="r", allow_pickle=False)
    if not arrays:
        raise ValueError("it names no array")
    return arrays
