"""The script for GPUs runs on a CPU, all of it, and says what it should of a figure that is not as wanted."""

from unittest import mock

import pytest

from dev import gpu_check
from tests import training

NANOCHAT = """import itertools, time
for step in itertools.count():
    print(f"step {step:05d} | loss: 9.0 | tok/sec: {1000 * (step + 1):,} | bf16_mfu: 0.00", flush=True)
    time.sleep(0.001)
"""


def run(path, capsys, *flags):
    """(exit code, lines of the table) of the script on a CPU, where data and tokenizer are there already."""
    given = ["--device=cpu", "--tiny", f"--base-dir={path}", f"--out={path / 'out'}", *flags]
    with training.workplace(path):
        code = gpu_check.main(given)
    printed = capsys.readouterr().out.splitlines()
    return code, printed[printed.index("") + 2:-2]


def test_every_part_runs_and_tells_each_measure(tmp_path, capsys):
    peer = tmp_path / "peer" / "scripts" / "base_train.py"
    peer.parent.mkdir(parents=True)
    peer.write_text(NANOCHAT)
    code, rows = run(tmp_path, capsys, f"--peer={peer.parents[1]}")
    assert code == 0, rows
    told = "\n".join(rows)
    on_gpus = {"d12: MFU, %", "d20: MFU, %"}
    assert [name for name in gpu_check.LIMITS if name not in told] == sorted(on_gpus)
    assert told.count("good") > 20 and told.count("told") > 10 and told.count("not measured here") > 8
    logs = {path.stem for path in (tmp_path / "out").glob("*.log")}
    assert logs >= {"tests", "peer-d24", "straight", "two-processes"}
    assert not (tmp_path / "runs").exists()


def test_what_is_not_as_wanted_or_breaks_fails_and_the_rest_is_still_measured(tmp_path, capsys):
    def bad(bench):
        yield "tests that fail", "these", 3.0

    def broken(bench):
        raise RuntimeError("no such kernel\nand more")

    def fine(bench):
        yield "tests that fail", "those", 0.0

    def late(bench):
        bench.end = 0.0
        bench.look_at_the_clock()

    with mock.patch.dict(gpu_check.PARTS, correct=[bad, broken, fine, late]), mock.patch.object(gpu_check, "prepare"):
        code, rows = run(tmp_path, capsys, "--part=correct")
    assert code == 1 and [row.split()[-1] for row in rows] == ["FAILS", "FAILS", "good", "run"]
    assert rows[3].endswith("not run")
    assert "no such kernel" in rows[1] and "and more" in (tmp_path / "out" / "errors.log").read_text()
    assert gpu_check.judge(float("nan"), "<= 1") == "FAILS"
    with pytest.raises(ValueError, match="--tiny"):
        gpu_check.main(["--device=cpu"])


def test_a_trace_tells_how_busy_the_gpu_was_and_who_waited_for_it():
    def event(cat, name, ts, dur, tid=1):
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    steps = [event("user_annotation", f"ProfilerStep#{i}", 100 * i, 90) for i in range(2)]
    gpu = [event("kernel", "a", 10, 30, 7), event("kernel", "b", 20, 10, 8),  # inside the first
           event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 30, 30, 7),  # 20 of it beside the first
           event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 10, 7)]
    waits = [event("cuda_runtime", "cudaEventSynchronize", 50, 5),
             event("cuda_runtime", "cudaStreamSynchronize", 150, 5),
             event("cuda_runtime", "cudaDeviceSynchronize", 95, 1),  # between the steps
             event("cuda_runtime", "cudaEventSynchronize", 60, 5, tid=2),  # the loader's thread
             event("cuda_runtime", "cudaMemcpyAsync", 70, 5)]
    assert gpu_check.read_trace([*steps, *gpu, *waits]) == {"busy": 60.0, "waits": 1.0, "pageable": 0.5}
    assert gpu_check.read_trace(steps) == {"busy": None, "waits": None, "pageable": None}
