"""Values and errors of ranks reach all of them, and one error is printed; devices, versions, and
each rank's GPU. Real gloo processes."""

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nanochat import dist as dist_module
from nanochat.common import Stop, check_stop, stops_if
from nanochat.dist import (
    autodetect_device_type,
    broadcast,
    check_all_equal,
    compute_cleanup,
    compute_init,
    cpu_name,
    driver_version,
    find_each_other,
    gather_all,
    gather_results,
    nvml_works,
    on_all_ranks,
    on_rank0,
    other_processors,
    prepare_cuda,
    versions,
    write_collectives,
    write_memory,
)
from nanochat.evaluations import log_ranks
from scripts import base_train, sample
from tests import training
from tests.training import as_bytes

# ---- a launch ------------------------------------------------------------------------------------

workplace = training.in_workplace(**training.SMALL)


def rank_main(job, folder, argv):
    """Do `job(rank)` as a script would, and save its value."""
    rank = compute_init("cpu")[1]
    torch.save(job(rank), folder / f"value-{rank}")
    gather_all(None)  # leave together


def launch(folder, world_size, job):
    group = training.launch(partial(rank_main, job, folder), [[]] * world_size, [{}] * world_size)
    return group, group.wait()


def values(folder, world_size, job):
    """The values of all ranks of a launch that must succeed."""
    group, codes = launch(folder, world_size, job)
    assert codes == [0] * world_size, group.text()
    return [torch.load(folder / f"value-{rank}", weights_only=True) for rank in range(world_size)]


# ---- values --------------------------------------------------------------------------------------


def some_tensors():
    """Tensors of many dtypes, a scalar and an empty one."""
    torch.manual_seed(0)
    dtypes = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.uint16,
        torch.float8_e4m3fn,
    )
    return [
        *((torch.rand(3, 5) * 100).to(dtype) for dtype in dtypes),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(3, 0),
        torch.nn.Parameter(torch.full((2,), 3.0)),
    ]


def all_kinds(rank):
    check_all_equal({"a": 1, "b": [None]})
    tensors = some_tensors()
    for tensor in tensors:
        if rank > 0:
            tensor.detach().view(-1).view(torch.uint8).zero_()
        broadcast(tensor)
    return {
        "rank0": on_rank0(lambda: {"from": rank, "none": None}),
        "agree": on_all_ranks(lambda: rank * 10),
        "all": gather_all((rank, None)),
        "bits": repr(as_bytes(tensors)),
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_and_the_bits_of_tensors_reach_all_ranks(tmp_path, world_size):
    bits = repr(as_bytes(some_tensors()))
    for rank, value in enumerate(values(tmp_path, world_size, all_kinds)):
        assert value == {
            "rank0": {"from": 0, "none": None},
            "agree": rank * 10,
            "all": [(r, None) for r in range(world_size)],
            "bits": bits,
        }


# ---- errors --------------------------------------------------------------------------------------


def raise_it(error):
    raise error


def fail_on(bad, how, rank):
    return how(
        lambda: raise_it(FileNotFoundError(f"x.bin of {rank}: missing")) if rank in bad else rank
    )


def start_differently(rank):
    check_all_equal(
        {
            "data_path": "/data" if rank != 2 else "/other",
            "seed": 42,
            **({"extra": 1} if rank == 2 else {}),
        }
    )


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (partial(fail_on, (0, 1, 2, 3), on_all_ranks), "x.bin of 0: missing"),
        (partial(fail_on, (3,), on_all_ranks), "rank 3 on host {host}: x.bin of 3: missing"),
        (
            partial(fail_on, (1, 3), on_all_ranks),
            "rank 1 on host {host}: x.bin of 1: missing (2 of 4 ranks failed)",
        ),
        (partial(fail_on, (0,), on_rank0), "x.bin of 0: missing"),
        (
            start_differently,
            "rank 2 on host {host}: started differently: data_path is '/other', on rank 0 it is '/data'; "
            "extra is 1, on rank 0 it is None; start all processes with the same flags and environment, the same files "
            "under the same paths, and the same tokenizer",
        ),
    ],
)
def test_an_error_is_printed_once_with_rank_and_host_unless_rank_0_or_all_ranks_failed(
    tmp_path, job, message
):
    group, codes = launch(tmp_path, 4, job)
    assert codes == [1] * 4 and not list(tmp_path.glob("value-*")), group.text()
    printed = f"error: {message.format(host=socket.gethostname())}\n"
    assert group.text() == group.outputs[0].read_text() == printed


def stop_on(bad, how, rank):
    """Only rank `bad` has a reason to stop, and raises it while it waits."""

    def wait():
        if rank == bad:
            check_stop()
        raise ValueError("a bad flag")

    with (
        stops_if(lambda: "SIGTERM" if rank == bad else ""),
        pytest.raises(Stop, match=re.escape(f"SIGTERM (rank {bad})")),
    ):
        how(wait)


@pytest.mark.parametrize(("how", "bad"), [(on_all_ranks, 1), (on_rank0, 0), (gather_results, 1)])
def test_a_stop_of_one_rank_ends_all_ranks_for_its_reason(tmp_path, how, bad):
    values(tmp_path, 2, partial(stop_on, bad, how))


def bug_on(bad, how, rank):
    how(lambda: raise_it(KeyError("a bug") if rank == bad else ValueError("a bad flag")))


@pytest.mark.parametrize(("how", "bad"), [(on_all_ranks, 0), (on_all_ranks, 1), (on_rank0, 0)])
def test_a_bug_is_printed_alone_with_its_traceback(tmp_path, how, bad):
    group, codes = launch(tmp_path, 2, partial(bug_on, bad, how))
    assert codes == [1, 1] and not list(tmp_path.glob("value-*"))
    text = group.outputs[bad].read_text()
    assert group.text() == text and "KeyError: 'a bug'" in text and "in bug_on" in text


# ---- processes that find each other --------------------------------------------------------------


def say_it_soon():
    """A hook."""
    dist_module.SLOW_S = 0.0


def give_up_soon():
    """A hook."""
    dist_module.JOIN_S = 0.0


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def some_of(world_size, ranks, main, argv, hook=say_it_soon, port=None):
    """Start only these ranks of a launch that torchrun does not start."""
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "LOCAL_RANK": "0"}
    common["MASTER_PORT"] = str(port or free_port())
    groups = {}
    for rank in ranks:
        env = {**common, "RANK": str(rank)}
        groups[rank] = training.launch(main, [argv], [env], hook)
    return groups


@pytest.mark.parametrize(
    ("ranks", "waits", "for_whom"),
    [((0,), 0, "ranks 1, 2 of 3"), ((1,), 1, "rank 0 of 3"), ((0, 1), 0, "rank 2 of 3")],
)
def test_sigterm_ends_a_training_that_waits_for_ranks_which_it_has_named(ranks, waits, for_whom):
    """Regression: with variables left over from another launch, nothing was printed, and nothing
    but SIGKILL ended the process."""
    groups = some_of(3, ranks, base_train.main, training.flags())
    named = f"waiting for {for_whom} (RANK={waits} WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT="
    try:
        training.wait_for(lambda: named in groups[waits].text())
        # the other ranks first: the store is gone with rank 0
        for rank in reversed(ranks):
            os.kill(groups[rank].processes[0].pid, signal.SIGTERM)
            assert groups[rank].wait() == [0]
            assert "stopped: SIGTERM" in groups[rank].text()
    finally:
        for group in groups.values():
            group.kill()


def test_a_rank_that_has_left_the_wait_is_waited_for_again():
    """Regression: it still counted, so that the others went into a call which no signal ends; and
    later rank 0 sometimes read its id just after it was deleted, and waited for that."""
    groups = some_of(3, (0, 1), base_train.main, training.flags())

    def last_line():
        return groups[0].text().rpartition("waiting for ")[2]

    try:
        training.wait_for(lambda: last_line().startswith("rank 2 of 3"))
        os.kill(groups[1].processes[0].pid, signal.SIGTERM)
        assert groups[1].wait() == [0]
        training.wait_for(lambda: last_line().startswith("ranks 1, 2 of 3"))
        os.kill(groups[0].processes[0].pid, signal.SIGTERM)
        assert groups[0].wait() == [0]
    finally:
        for group in groups.values():
            group.kill()


def test_rank_0_does_not_wait_for_an_id_that_is_taken_back_while_it_reads_it():
    """Regression: it did, in a call that no signal ends, on a busy machine now and then."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    leaves, has_left = threading.Event(), threading.Event()

    def leave_if_asked(missing):
        if leaves.is_set():
            raise Stop("rank 1 leaves")

    def end_once_both_are_missing(missing):
        if missing == [1, 2] and has_left.is_set():
            raise Stop("the case")

    def look(keys):
        found = store.check(keys)
        if keys == ["process/1"] and found:  # rank 1 leaves before rank 0 reads what it has seen
            leaves.set()
            assert has_left.wait(training.PATIENCE_S)
        return found

    def rank_1():
        with contextlib.suppress(Stop):
            find_each_other(store, 1, 3, SimpleNamespace(check=leave_if_asked))
        has_left.set()

    seen_by_0 = SimpleNamespace(
        set=store.set, get=store.get, check=look, compare_set=store.compare_set
    )
    other = threading.Thread(target=rank_1)
    other.start()
    with pytest.raises(Stop, match="the case"):
        find_each_other(seen_by_0, 0, 3, SimpleNamespace(check=end_once_both_are_missing))
    other.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_command_that_waits_for_ranks_which_it_has_named(rank):
    [group] = some_of(2, [rank], sample.main, ["--device-type=cpu"]).values()
    try:
        training.wait_for(lambda: f"waiting for rank {1 - rank} of 2" in group.text())
        os.kill(group.processes[0].pid, signal.SIGINT)
        assert group.wait() == [130]
    finally:
        group.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_does_not_wait_for_ever_for_another_rank(rank):
    [group] = some_of(2, [rank], sample.main, ["--device-type=cpu"], hook=give_up_soon).values()
    assert group.wait() == [1]
    [line] = group.text().splitlines()
    assert line.startswith(f"error: rank {1 - rank} of 2 did not come within ")
    assert f"RANK={rank} WORLD_SIZE=2 " in line and line.endswith("unset RANK for a single one")


def own_rank(rank):
    return rank


def test_rank_0_may_come_after_the_others_have_begun_to_wait_for_it(tmp_path):
    job = partial(rank_main, own_rank, tmp_path)
    port = free_port()
    [first] = some_of(2, [1], job, [], port=port).values()
    training.wait_for(lambda: "waiting for rank 0 of 2" in first.text())
    [second] = some_of(2, [0], job, [], port=port).values()
    assert first.wait() == second.wait() == [0], first.text() + second.text()


def test_a_port_that_another_program_uses_is_one_sentence():
    """Regression: a traceback."""
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        port = s.getsockname()[1]
        [group] = some_of(2, [0], sample.main, ["--device-type=cpu"], port=port).values()
        assert group.wait() == [1]
    [line] = group.text().splitlines()
    assert line.startswith("error: ") and "in use" in line and f"MASTER_PORT={port})" in line


@pytest.mark.parametrize(
    "changed", [{"MASTER_ADDR": ""}, {"MASTER_PORT": "x"}, {"MASTER_PORT": "99999"}]
)
def test_an_address_that_cannot_be_is_one_sentence(changed, monkeypatch):
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in (env | changed).items():
        monkeypatch.setenv(name, value)
    [(name, value)] = changed.items()
    with pytest.raises(ValueError, match=rf"{name}={value}[ :].* unset RANK"):
        compute_init("cpu")


# ---- the device ----------------------------------------------------------------------------------

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCHINDUCTOR_SHAPE_PADDING",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@pytest.mark.parametrize(
    ("device_type", "deterministic", "nvml", "expected"),
    [
        ("cpu", True, True, [False, None, None, None, None]),
        ("cuda", True, True, [True, ":4096:8", "1", "0", "expandable_segments:True"]),
        ("cuda", False, True, [False, None, None, None, "expandable_segments:True"]),
        ("cuda", False, False, [False, None, None, None, None]),
    ],
)
def test_cuda_variables_are_set_before_cuda_is_first_used_and_only_for_it(
    device_type, deterministic, nvml, expected, monkeypatch
):
    monkeypatch.setattr(dist_module, "nvml_works", lambda: nvml)
    at_first_use = []
    torch.backends.cuda.enable_cudnn_sdp(True)

    def is_available():
        at_first_use.extend(
            [torch.are_deterministic_algorithms_enabled(), *map(os.environ.get, VARIABLES)]
        )
        return False

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    refused = (
        pytest.raises(ValueError, match="--device-type: got 'cuda'")
        if device_type == "cuda"
        else nullcontext()
    )
    with mock.patch.dict(os.environ), refused:
        for name in VARIABLES:
            os.environ.pop(name, None)
        try:
            compute_init(device_type, deterministic=deterministic)
        finally:
            torch.use_deterministic_algorithms(False)
    assert at_first_use == expected
    assert torch.backends.cuda.cudnn_sdp_enabled() == (device_type == "cpu"), (
        "PyTorch would choose a kernel by mode"
    )
    assert torch.utils.deterministic.fill_uninitialized_memory != expected[0]


@pytest.mark.parametrize(
    ("library", "works"),
    [
        (types.SimpleNamespace(nvmlInit_v2=lambda: 0), True),
        (types.SimpleNamespace(nvmlInit_v2=lambda: 9), False),  # the library, but no driver
        (types.SimpleNamespace(), False),
    ],
)
def test_nvml_works_only_if_it_starts(monkeypatch, library, works):
    monkeypatch.setattr(dist_module.ctypes, "CDLL", lambda name: library)
    assert nvml_works() == works


def test_a_missing_nvml_does_not_work():
    assert not nvml_works("libno-such-library.so.1")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_products_of_float32_matrices_are_float32(device_type, monkeypatch):
    """Regression: on a GPU they were TF32, set by a switch that made PyTorch's older switch
    raise."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    torch.set_float32_matmul_precision("high")
    try:
        with mock.patch.dict(os.environ):
            compute_init(device_type)
        assert (
            torch.get_float32_matmul_precision() == "highest"
            and not torch.backends.cuda.matmul.allow_tf32
        )
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")


def read_by_torch(rank):
    for name in [name for name in os.environ if name.startswith(("PYTORCH", "TORCHINDUCTOR"))]:
        del os.environ[name]
    dist_module.nvml_works = lambda: True
    prepare_cuda(True)
    sys.modules.pop("torch._inductor.config", None)
    inductor = importlib.import_module("torch._inductor.config")
    read = getattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: "PyTorch 2.11 has no such call"
    )
    return inductor.deterministic and not inductor.shape_padding, read()


def test_torch_reads_what_is_set_after_it_was_imported(tmp_path):
    """The allocator reads it when it starts, Inductor when it is imported, which no run does before
    (tests/ring/test_base_train.py)."""
    [(deterministic, settings)] = values(tmp_path, 1, read_by_torch)
    assert deterministic and settings in (
        "expandable_segments:True",
        "PyTorch 2.11 has no such call",
    )


def test_versions_lists_everything_that_bits_depend_on(monkeypatch, tmp_path):
    """Regression: NCCL, the driver and the implementation of attention were missing."""
    names = [
        "torch",
        "gpu",
        "cuda",
        "cudnn",
        "nccl",
        "driver",
        "attention",
        "cpu",
        "cpu_capability",
        "cpu_settings",
    ]
    assert [*versions(torch.device("cpu"))] == names
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    on_gpu = versions(torch.device("cuda"))
    assert [*on_gpu] == names and (on_gpu["gpu"], on_gpu["nccl"], on_gpu["attention"]) == (
        "NVIDIA H100",
        "2.29.7",
        "wheel",
    )
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert versions(torch.device("cuda"))["attention"] == "wheel, cudnn for full windows"
    listed = tmp_path / "version"
    assert driver_version(listed) is None
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
    ):
        listed.write_text(line + "\nGCC version:  gcc version 13.3.0\n")
        assert driver_version(listed) == "580.95.05"


SMI = "#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3, 580.95.05\\nNVIDIA H100 80GB HBM3, 580.95.05\\n'\n"


PROCESSOR = """
import json
from nanochat.dist import processor
print(json.dumps(processor()))
"""


def test_the_processor_is_described_by_its_name_its_instruction_set_and_the_settings_of_its_libraries(
    tmp_path,
):
    """Regression: these decide bits on a CPU, and nothing recorded them."""
    settings = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MKL_", "ONEDNN_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROCESSOR], env={**others, **settings}, capture_output=True
    )
    found = json.loads(done.stdout)
    assert (found["cpu_capability"], found["cpu_settings"]) == (
        "DEFAULT",
        "MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2",
    )
    assert found["cpu"]
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) @ 2.80GHz\n\nmodel name\t: another\n"
    )
    assert cpu_name(listed) == "Intel(R) Xeon(R) @ 2.80GHz"
    listed.write_text("CPU implementer\t: 0x41\n")
    assert cpu_name(listed) == cpu_name(tmp_path / "missing") != ""


def processors_of_a_grown_cluster(rank):
    with mock.patch.object(
        dist_module, "processor", lambda: {"cpu": "EPYC", "cpu_capability": f"AVX{rank % 3}"}
    ):
        return other_processors()


def test_ranks_whose_processors_round_differently_are_named(tmp_path):
    host = socket.gethostname()
    for found in values(tmp_path, 4, processors_of_a_grown_cluster):
        assert found == [
            f"rank {rank} on host {host}: cpu_capability is AVX{rank}, on rank 0 it is AVX0"
            for rank in (1, 2)
        ]


def compute_with_vsx_on_rank_1():
    """A hook."""
    if os.environ["RANK"] == "1":
        dist_module.processor = lambda: {
            "cpu": "POWER9",
            "cpu_capability": "VSX",
            "cpu_settings": None,
        }


def test_ranks_with_different_processors_train_together_after_a_note():
    group = training.start(2, hook=compute_with_vsx_on_rank_1, num_iterations=2, save_every=-1)
    assert group.wait() == [0, 0], group.text()
    assert (
        group.text().count("note: rank 1 on host") == 1
        and "cpu_capability is VSX, on rank 0" in group.text()
    )


def test_gpus_that_pytorch_does_not_see_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert autodetect_device_type() == "cpu", "no nvidia-smi"
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    message = (
        rf"2 GPUs \(NVIDIA H100 80GB HBM3, driver 580.95.05\).*sees none: "
        rf"{re.escape(torch.__version__)}, built .*; install a build that .*--device-type.cpu"
    )
    with pytest.raises(ValueError, match=message):
        autodetect_device_type()
    with mock.patch.dict(os.environ), pytest.raises(ValueError, match=message):
        compute_init("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert autodetect_device_type() == "cpu", "the user hides them on purpose"


def test_a_group_is_left_unless_an_error_is_being_raised(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        compute_cleanup()
    assert not calls
    compute_cleanup()
    assert calls


# ---- each rank's GPU -----------------------------------------------------------------------------


def log_every_step():
    base_train.RANKS_EVERY = 1


LEAVE = """
from pathlib import Path
from nanochat.dist import compute_cleanup, compute_init
compute_init("cpu", deterministic=True)
import torch._dynamo  # as torch.optim does
compute_cleanup()
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print("threads of Gloo:", sum("gloo" in name for name in names))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the threads")
def test_no_thread_of_the_group_is_left_to_end_while_python_does():
    """Regression: in 1 of 20 launches on a busy machine, such a thread took the GIL too late, and the
    process was aborted after its work was done."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    done = subprocess.run(
        [*torchrun, "--no-python", sys.executable, "-c", LEAVE], capture_output=True, text=True
    )
    assert done.returncode == 0 and "threads of Gloo: 0" in done.stdout, done.stdout + done.stderr


def test_every_ranks_own_time_is_logged_at_intervals():
    training.finish(2, hook=log_every_step, num_iterations=3, save_every=0)
    records = training.events("ranks")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record, step in zip(records, training.steps().values(), strict=True):
        assert len(record["ranks"]) == 2 and all(
            0 < rank["own_s"] < step["step_s"] for rank in record["ranks"]
        )


def test_clock_and_power_are_logged_if_they_can_be_read(monkeypatch):
    events = []
    journal = types.SimpleNamespace(
        event=lambda name, step, **record: events.append(record["ranks"][0])
    )
    parts = types.SimpleNamespace(
        loader=types.SimpleNamespace(device=torch.device("cuda", 0)),
        progress=types.SimpleNamespace(step=7),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    log_ranks(parts, journal, 0.0)  # without a driver
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 650_000)
    log_ranks(parts, journal, 0.0)
    assert (
        events[0].keys() == {"own_s"}
        and events[1]["clock_mhz"] == 1980
        and events[1]["power_w"] == 650
    )


def test_a_failing_dump_never_hides_why_a_launch_ends(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_collectives(run_dir, 0)  # no group
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    write_collectives(run_dir, 0)  # this PyTorch has no NCCL
    assert [*run_dir.iterdir()] == []
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False
    )
    write_collectives(run_dir, 1)
    write_collectives(run_dir / "gone", 0)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {"segments": []})
    assert "memory-rank0.pickle shows what was allocated" in write_memory(run_dir, 0)
    assert "could not be written" in write_memory(run_dir / "gone", 0)
    assert {path.name for path in run_dir.iterdir()} == {"nccl-rank1.pickle", "memory-rank0.pickle"}
