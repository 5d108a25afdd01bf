"""Shell scripts: speedrun.sh runs valid commands in a working order and stops at a failure; setup.sh; the lock file."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dev import make_sample_corpus
from nanochat import dataset
from nanochat.cli import Parser
from nanochat.schedule import resolve_horizon
from scripts import base_eval, base_train, report, sample, tok_eval, tok_train
from tests.training import PATIENCE_S

ROOT = Path(__file__).parent.parent
SCRIPTS = {"speedrun.sh": "gpu", "runs/miniseries.sh": "h100", "runs/scaling_laws.sh": "h100",
           "dev/setup.sh": "hardware", "dev/test.sh": "gpu", ".ci/run": "",
           "dev/run_until_done.sh": "hardware", "dev/slurm/train_chain.sbatch": "hardware",
           "dev/slurm/tok_shards.sbatch": "hardware", "dev/e2e_slurm.sh": "hardware"}
MODULES = {m.__name__: m for m in (
    make_sample_corpus, dataset, base_eval, base_train, report, sample, tok_eval, tok_train)}


def speedrun(cwd=ROOT, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("WANDB_RUN", "NGPU", "PROFILE", "DRY_RUN")}
    return subprocess.run(["bash", "speedrun.sh"], cwd=cwd, env={**kept, **environment}, capture_output=True, text=True,
                          timeout=PATIENCE_S)


def commands(**environment):
    """The commands that a dry run prints, as lists of words."""
    result = speedrun(DRY_RUN="1", **environment)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines() if line and not line.startswith("#")]


def module_of(words):
    return words[words.index("-m") + 1] if "-m" in words else None


def arguments(words):
    """The arguments of a command's module, without the `--` that torchrun removes."""
    rest = words[words.index("-m") + 2:]
    return [w for w in (rest[1:] if rest[:1] == ["--"] else rest) if w != "&"]


@pytest.fixture(params=["gpu", "cpu"])
def profile(request):
    return request.param


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_strict_bash_and_states_its_cost(script):
    text = (ROOT / script).read_text()
    assert subprocess.run(["bash", "-n", ROOT / script], capture_output=True).returncode == 0
    assert text.startswith("#!/usr/bin/env bash\n#") and "\nset -euo pipefail\n" in text
    assert os.access(ROOT / script, os.X_OK)
    head = text.partition("\nset -euo")[0].lower()
    if script != ".ci/run":
        assert SCRIPTS[script] in head and "cost" in head and ("minutes" in head or "duration" in head)


def test_ci_runs_exactly_the_test_script():
    lines = [x for x in (ROOT / ".ci/run").read_text().splitlines() if x and not x.startswith(("#", "set "))]
    assert lines == ['exec bash "$(dirname "${BASH_SOURCE[0]}")/../dev/test.sh"']


def test_the_stages_have_a_working_order(profile):
    modules = [module_of(words) for words in commands(PROFILE=profile)]
    tail = ["scripts.base_train", "scripts.base_eval", "scripts.sample", "scripts.report"]
    if profile == "gpu":  # None: setup, and the wait for the download
        assert modules == [None, "nanochat.dataset", "nanochat.dataset", "scripts.tok_train", "scripts.tok_eval", None,
                           *tail]
    else:
        assert modules == [None, "dev.make_sample_corpus", "scripts.tok_train", *tail]


def test_every_module_accepts_its_command(profile, monkeypatch):
    def stop(parser, argv=None):
        parse(parser, argv)
        raise KeyError("parsed")

    parse, checked = Parser.parse_args, 0
    for words in commands(PROFILE=profile):
        if (name := module_of(words)) is None:
            continue
        module = MODULES[name]
        if hasattr(module, "parse_args"):
            assert vars(module.parse_args(arguments(words)))
        else:  # main builds the parser: stop after parsing
            with monkeypatch.context() as patched, pytest.raises(KeyError, match="parsed"):
                patched.setattr(Parser, "parse_args", stop)
                module.main(arguments(words))
        checked += 1
    assert checked == (8 if profile == "gpu" else 6)


def test_all_stages_use_the_same_run_and_folders(profile, tmp_path):
    base = tmp_path / "with a space"
    words_of = {module_of(words): words for words in commands(PROFILE=profile, NANOCHAT_BASE_DIR=str(base))}
    train = base_train.parse_args(arguments(words_of["scripts.base_train"]))
    for name in ("base_eval", "sample", "report"):
        assert MODULES[f"scripts.{name}"].parse_args(arguments(words_of[f"scripts.{name}"])).run == train.model_tag
    tokenizer = tok_train.parse_args(arguments(words_of["scripts.tok_train"]))
    assert (train.data_path or None) == (str(tokenizer.data_path) if tokenizer.data_path else None)
    assert (train.tokenizer or None) == (str(tokenizer.output_dir) if tokenizer.output_dir else None)
    if profile == "cpu":
        assert f"--output-dir={train.data_path}" in words_of["dev.make_sample_corpus"]
        assert Path(train.data_path).is_relative_to(base) and Path(train.tokenizer).is_relative_to(base)
    assert not base.exists(), "a dry run writes nothing"


def test_only_a_run_name_enables_wandb(profile):
    for environment, expected in (({}, "dummy"), ({"WANDB_RUN": ""}, "dummy"), ({"WANDB_RUN": "my run"}, "my run")):
        stages = commands(PROFILE=profile, **environment)
        words = next(w for w in stages if module_of(w) == "scripts.base_train")
        assert base_train.parse_args(arguments(words)).run == expected
        assert not any("wandb" in w for words in stages for w in words)


def test_the_gpu_profile_trains_on_all_gpus_and_downloads_enough_for_its_horizon():
    stages = commands(PROFILE="gpu", NGPU="3")
    words = next(w for w in stages if module_of(w) == "scripts.base_train")
    assert words[:6] == ["torchrun", "--standalone", "--nproc_per_node=3", "-m", "scripts.base_train", "--"]
    train = base_train.parse_args(arguments(words))
    assert train.depth == 24 and train.device_type == "cuda"
    horizon = resolve_horizon(
        num_iterations=train.num_iterations, target_flops=train.target_flops, total_batch_size=train.total_batch_size,
        target_param_data_ratio=train.target_param_data_ratio, weight_decay=0.0, sequence_len=2048,
        scaling_params=24 * 12 * 1536**2 + 32768 * 1536, reference_scaling_params=12 * 12 * 768**2 + 32768 * 768,
        flops_per_token=1)
    first, rest = (int(w[w.index("-n") + 1]) for w in stages if module_of(w) == "nanochat.dataset")
    assert first * 250e6 >= tok_train.parse_args([]).max_chars
    assert rest * 250e6 >= 1.1 * horizon.total_tokens * 4.7 / 0.65
    assert next(w for w in stages if "300" in w)[-1] == "&"


def test_without_gpus_the_default_profile_is_cpu_and_profile_gpu_is_an_error(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/usr/bin/env bash\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "# profile cpu" in speedrun(DRY_RUN="1", PATH=path).stdout
    result = speedrun(PROFILE="gpu", PATH=path, NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    assert result.returncode == 2 and "no GPU" in result.stderr and not (tmp_path / "base").exists()
    (tmp_path / "nvidia-smi").write_text("#!/usr/bin/env bash\necho 'GPU 0: A'\necho '  MIG 1'\necho 'GPU 1: B'\n")
    assert "# profile gpu, GPUs: 2" in speedrun(DRY_RUN="1", PATH=path).stdout
    assert speedrun(DRY_RUN="1", PROFILE="tpu").returncode == 2


# ---- orchestration, with fake stages --------------------------------------------------------------------------------

STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
if [[ "$*" == *"-n 300"* ]]; then {download}; fi
if [[ "$*" == *"{failing}"* ]]; then exit 7; fi
"""


def stand_ins(folder, *, download="true", failing="nothing"):
    """A checkout whose commands only record that they were called."""
    (folder / "dev").mkdir(parents=True)
    (folder / "dev" / "setup.sh").write_text("exit 0\n")
    (folder / "speedrun.sh").write_bytes((ROOT / "speedrun.sh").read_bytes())
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "torchrun"):
        path = folder / ".venv" / "bin" / name
        path.write_text(STAND_IN.format(download=download, failing=failing))
        path.chmod(0o755)
    return folder


def called(folder):
    return re.findall(r"-m (\S+)", (folder / "calls").read_text())


def test_a_failed_stage_stops_the_script_and_its_time_is_recorded(tmp_path):
    folder = stand_ins(tmp_path / "repo", failing="base_train")
    result = speedrun(folder, PROFILE="cpu", CALLS=str(folder / "calls"), NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    assert result.returncode == 7 and "stage 'training' failed (7)" in result.stderr
    assert called(folder) == ["dev.make_sample_corpus", "scripts.tok_train", "scripts.base_train"]
    lines = (tmp_path / "base" / "speedrun-cpu-stages.tsv").read_text().splitlines()
    assert [line.split("\t")[::2] for line in lines] == [["set-up", "0"], ["sample corpus", "0"], ["tokenizer", "0"],
                                                         ["training", "7"]]


@pytest.mark.parametrize("download", ["true", "echo gone; exit 5"])
def test_training_waits_for_the_download_and_does_not_start_if_it_fails(tmp_path, download):
    folder = stand_ins(tmp_path / "repo", download=f"sleep 0.3; {download}")
    result = speedrun(folder, PROFILE="gpu", NGPU="2", CALLS=str(folder / "calls"),
                      NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    names = called(folder)
    assert names.count("nanochat.dataset") == 2 and "scripts.tok_eval" in names
    if download == "true":
        assert result.returncode == 0 and names[-1] == "scripts.report"
    else:
        assert result.returncode == 5 and "gone" in result.stderr and "scripts.base_train" not in names


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_the_download_ends_with_the_script(tmp_path):
    folder = stand_ins(tmp_path / "repo", download=f"echo $$ >{tmp_path}/pid; exec sleep 60", failing="tok_train")
    # the tokenizer fails only after the download has started
    path = folder / ".venv" / "bin" / "python"
    path.write_text(path.read_text().replace("then exit 7", f"then until [[ -s {tmp_path}/pid ]]; do :; done; exit 7"))
    result = speedrun(folder, PROFILE="gpu", NGPU="2", CALLS=str(folder / "calls"),
                      NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    assert result.returncode == 7
    pid = (tmp_path / "pid").read_text().strip()
    for _ in range(200):
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return
    pytest.fail("the download still runs")


# ---- setup.sh -------------------------------------------------------------------------------------------------------

@pytest.fixture
def setup(tmp_path):
    """Runs dev/setup.sh in a copy of the project, with `executable` files added to the PATH first."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("dev/setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)

    def run(executables=None, **environment):
        for name, text in (executables or {}).items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        kept = {key: value for key, value in os.environ.items() if key != "TORCH"}
        path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} if executables else {}
        return subprocess.run(["bash", "dev/setup.sh"], cwd=tmp_path, capture_output=True, text=True,
                              env={**kept, **path, **environment})

    return run


def test_setup_refuses_an_interpreter_without_torch_for_an_installed_torch(setup, tmp_path):
    python = f'exec {sys.executable} -S "$@"'  # without its packages
    done = setup({"bare-python": python}, TORCH="installed", PYTHON=str(tmp_path / "bin" / "bare-python"))
    assert done.returncode == 1 and "has no torch; choose one that has" in done.stderr, done.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_uses_uv_if_it_exists_but_pip_in_an_environment_made_by_pip(setup, tmp_path):
    uv = (f'echo "$@" >>{tmp_path}/calls\nmkdir -p .venv/bin\n'
          f'printf \'#!/bin/sh\\n[ "$2" != pip ] && exec {sys.executable} "$@"\' >.venv/bin/python\n'
          f'chmod +x .venv/bin/python')
    for _ in range(2):  # the second run has nothing to do
        done = setup({"uv": uv}, PYTHON="python3.12")
        assert done.returncode == 0, done.stderr
    assert [line for line in (tmp_path / "calls").read_text().splitlines() if "version" not in line] == [
        "sync --inexact --extra dev --python python3.12"]
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\n[ "$2 $3" != "pip install" ] && exec {sys.executable} "$@"')
    (tmp_path / ".venv/.setup-stamp").unlink()
    done = setup({"uv": uv}, PYTHON="python3.12")
    assert done.returncode == 1 and "could not install .venv/requirements-torch.txt" in done.stderr


def test_setup_shows_the_progress_of_a_long_install(setup):
    done = setup({"uv": "[ $1 = --version ] && echo uv 1 && exit\necho Downloading torch\nsleep 0.5\n"
                        f"mkdir -p .venv/bin && ln -sf {sys.executable} .venv/bin/python"}, SETUP_PROGRESS_S="0.05")
    assert done.returncode == 0 and re.search(r"setup: installing uv.lock, \d+ s: Downloading torch", done.stdout), done


# ---- the lock file and the machine ----------------------------------------------------------------------------------

def test_the_lock_file_fits_the_project_and_names_only_public_hosts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    [ours] = [package for package in tomllib.loads(text)["package"] if package["name"] == project["name"]]
    locked = {(entry["name"], tuple(entry.get("extras", ())), entry.get("specifier", ""))
              for entry in ours["metadata"]["requires-dist"]}
    required = {Requirement(line) for lines in (project["dependencies"], *project["optional-dependencies"].values())
                for line in lines}
    assert locked == {(canonicalize_name(r.name), tuple(r.extras), str(r.specifier)) for r in required}


@pytest.mark.parametrize(("cores", "warns"), [(-1, True), (10**6, False)])
def test_speedrun_warns_on_a_busy_machine(tmp_path, cores, warns):
    """The load is above the number of cores that nproc prints."""
    (tmp_path / "nproc").write_text(f"#!/bin/sh\necho {cores}\n")
    (tmp_path / "nproc").chmod(0o755)
    result = speedrun(DRY_RUN="1", PROFILE="cpu", OMP_NUM_THREADS="2", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 0 and ("OMP_NUM_THREADS=1" in result.stdout) == warns
    assert not warns or re.search(r"# warning: the load of this machine is [\d.]+ on -1 cores", result.stdout)
