"""Shell scripts: speedrun.sh runs valid commands in a working order and stops at a failure;
setup.sh; the lock file."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nanochat.cli import Parser
from nanochat.schedule import resolve_horizon
from scripts import tok_train
from tests.training import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    "speedrun.sh",
    "runs/miniseries.sh",
    "runs/scaling_laws.sh",
    "runs/batch_ramp.sh",
    "runs/cut_spike.sh",
    "runs/switch_mixture.sh",
    "runs/wsd.sh",
    "dev/setup.sh",
    "dev/test.sh",
    ".ci/run",
    "dev/run_until_done.sh",
    "dev/slurm/train_chain.sbatch",
    "dev/slurm/tok_shards.sbatch",
    "dev/e2e_slurm.sh",
]


def speedrun(cwd=ROOT, **environment):
    kept = {
        k: v for k, v in os.environ.items() if k not in ("WANDB_RUN", "NGPU", "PROFILE", "DRY_RUN")
    }
    return subprocess.run(
        ["bash", "speedrun.sh"],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def commands(**environment):
    """The commands that a dry run prints, as lists of words."""
    result = speedrun(DRY_RUN="1", **environment)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return [
        shlex.split(line)
        for line in result.stdout.splitlines()
        if line and not line.startswith("#")
    ]


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


def module_of(words):
    return words[words.index("-m") + 1] if "-m" in words else None


def parsed(words):
    """The arguments of a command, as its module parses them."""
    parse = Parser.parse_args
    found = []
    rest = words[words.index("-m") + 2 :]

    def stop(parser, argv=None):
        found.append(parse(parser, argv))
        raise KeyError("parsed")

    # torchrun removes the first, the shell the second
    argv = [word for word in rest if word not in ("--", "&")]
    with mock.patch.object(Parser, "parse_args", stop), pytest.raises(KeyError, match="parsed"):
        importlib.import_module(module_of(words)).main(argv)
    return found[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_strict_bash_and_states_its_cost(script):
    text = (ROOT / script).read_text()
    assert subprocess.run(["bash", "-n", ROOT / script], capture_output=True).returncode == 0
    assert text.startswith("#!/usr/bin/env bash\n#") and "\nset -euo pipefail\n" in text
    assert os.access(ROOT / script, os.X_OK)
    head = text.partition("\nset -euo")[0].lower()
    assert script == ".ci/run" or ("cost" in head and ("minutes" in head or "duration" in head))


def test_ci_runs_exactly_the_test_script():
    lines = [
        x
        for x in (ROOT / ".ci/run").read_text().splitlines()
        if x and not x.startswith(("#", "set "))
    ]
    assert lines == ['exec bash "$(dirname "${BASH_SOURCE[0]}")/../dev/test.sh"']


@pytest.mark.parametrize(("profile", "num_commands"), [("gpu", 7), ("cpu", 5)])
def test_every_module_accepts_its_command_and_all_use_the_same_run_and_folders(
    profile, num_commands, tmp_path
):
    base = tmp_path / "with a space"
    stages = [
        words
        for words in commands(PROFILE=profile, NANOCHAT_BASE_DIR=str(base))
        if module_of(words)
    ]
    assert len(stages) == num_commands and not base.exists(), "a dry run writes nothing"
    of = {module_of(words): parsed(words) for words in stages}
    train, tokenizer = of["scripts.base_train"], of["scripts.tok_train"]
    assert train.run == "dummy"
    assert [of[f"scripts.{name}"].run for name in ("base_eval", "report")] == [train.model_tag] * 2
    assert (train.data_path or None) == (str(tokenizer.data_path) if tokenizer.data_path else None)
    assert (train.tokenizer or None) == (
        str(tokenizer.output_dir) if tokenizer.output_dir else None
    )
    if profile == "cpu":
        assert str(of["dev.make_sample_corpus"].output_dir) == train.data_path
        assert Path(train.data_path).is_relative_to(base) and Path(train.tokenizer).is_relative_to(
            base
        )


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
@pytest.mark.parametrize(
    ("environment", "run"), [({"WANDB_RUN": ""}, "dummy"), ({"WANDB_RUN": "my run"}, "my run")]
)
def test_only_a_run_name_enables_wandb(profile, environment, run):
    stages = commands(PROFILE=profile, **environment)
    assert parsed(next(w for w in stages if module_of(w) == "scripts.base_train")).run == run
    assert not any("wandb" in w for words in stages for w in words)


def test_the_gpu_profile_trains_on_all_gpus_and_downloads_enough_for_its_horizon():
    stages = commands(PROFILE="gpu", NGPU="3")
    words = next(w for w in stages if module_of(w) == "scripts.base_train")
    assert words[:6] == [
        "torchrun",
        "--standalone",
        "--nproc_per_node=3",
        "-m",
        "scripts.base_train",
        "--",
    ]
    train = parsed(words)
    assert train.depth == 24 and train.device_type == "cuda"
    horizon = resolve_horizon(
        num_iterations=train.num_iterations,
        target_flops=train.target_flops,
        total_batch_size=train.total_batch_size,
        target_param_data_ratio=train.target_param_data_ratio,
        weight_decay=0.0,
        sequence_len=2048,
        scaling_params=24 * 12 * 1536**2 + 32768 * 1536,
        reference_scaling_params=12 * 12 * 768**2 + 32768 * 768,
        flops_per_token=1,
    )
    first, rest = (int(w[w.index("-n") + 1]) for w in stages if module_of(w) == "nanochat.dataset")
    assert first * 250e6 >= tok_train.parse_args([]).max_chars
    assert rest * 250e6 >= 1.1 * horizon.total_tokens * 4.7 / 0.65
    assert next(w for w in stages if "300" in w)[-1] == "&"


def test_without_gpus_the_default_profile_is_cpu_and_profile_gpu_is_an_error(tmp_path):
    executable(tmp_path / "nvidia-smi", "#!/usr/bin/env bash\nexit 9\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "# profile cpu" in speedrun(DRY_RUN="1", PATH=path).stdout
    result = speedrun(PROFILE="gpu", PATH=path, NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    assert result.returncode == 2 and "no GPU" in result.stderr and not (tmp_path / "base").exists()
    (tmp_path / "nvidia-smi").write_text(
        "#!/usr/bin/env bash\necho 'GPU 0: A'\necho '  MIG 1'\necho 'GPU 1: B'\n"
    )
    assert "# profile gpu, GPUs: 2" in speedrun(DRY_RUN="1", PATH=path).stdout
    assert speedrun(DRY_RUN="1", PROFILE="tpu").returncode == 2


# ---- orchestration, with fake stages -------------------------------------------------------------

STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
if [[ "$*" == *"-n 300"* ]]; then {download}; fi
if [[ "$*" == *"{failing}"* ]]; then {fail}; fi
"""


def run_stages(base, profile, *, download="true", failing="nothing", fail="exit 7"):
    """(result, modules called) of the script in a checkout whose commands only record that they
    were called."""
    folder = base / "repo"
    for part in ("dev", ".venv/bin"):
        (folder / part).mkdir(parents=True)
    (folder / "dev" / "setup.sh").write_text("exit 0\n")
    shutil.copy(ROOT / "speedrun.sh", folder)
    for name in ("python", "torchrun"):
        executable(
            folder / ".venv" / "bin" / name,
            STAND_IN.format(download=download, failing=failing, fail=fail),
        )
    result = speedrun(
        folder, PROFILE=profile, NGPU="2", CALLS=str(base / "calls"), NANOCHAT_BASE_DIR=str(base)
    )
    return result, re.findall(r"-m (\S+)", (base / "calls").read_text())


def test_the_stages_of_the_cpu_profile_have_a_working_order(tmp_path):
    result, called = run_stages(tmp_path, "cpu")
    assert result.returncode == 0 and called == [
        "dev.make_sample_corpus",
        "scripts.tok_train",
        "scripts.base_train",
        "scripts.status",
        "scripts.base_eval",
        "scripts.report",
    ]


def known_digest():
    return re.search(r"^STEP_0=([0-9a-f]{16}) ", (ROOT / "speedrun.sh").read_text(), re.M)[1]


@pytest.mark.parametrize(
    ("digest", "said"),
    [
        (known_digest(), f"step 0 has the digest {known_digest()}, as on every machine"),
        (
            "0123456789abcdef",
            f"note: step 0 has the digest 0123456789abcdef, README's has {known_digest()}",
        ),
    ],
)
def test_whether_the_data_is_everyones_is_one_line_and_never_an_error(tmp_path, digest, said):
    log = tmp_path / "runs" / "speedrun-cpu" / "logs" / "train.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(
        f'{{"step": 0, "digest": "{digest}", "loss": 7.6}}\n{{"step": 1, "digest": "{"f" * 16}"}}\n'
    )
    result, _ = run_stages(tmp_path, "cpu")
    assert (
        result.returncode == 0
        and result.stdout.count("step 0 has the digest") == 1
        and said in result.stdout
    )


def test_the_digest_of_the_first_batch_is_in_the_readme():
    assert known_digest() in (ROOT / "README.md").read_text()


def test_a_signal_names_the_stage_and_the_way_on(tmp_path):
    """The stage sends the signal to the script, its parent."""
    result, called = run_stages(tmp_path, "cpu", failing="base_train", fail="kill -TERM $PPID")
    assert result.returncode == 143 and called[-1] == "scripts.base_train"
    assert (
        "speedrun: stopped in stage 'training'; to continue, run this script again" in result.stderr
    )


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_training_that_was_stopped_ends_the_script_with_the_way_on(tmp_path, profile):
    """Regression: after scripts.stop, it evaluated and reported a model of half its steps."""
    result, called = run_stages(tmp_path, profile, failing="scripts.status", fail="exit 10")
    assert result.returncode == 10 and called[-2:] == ["scripts.base_train", "scripts.status"]
    assert result.stderr == (
        "speedrun: the training was stopped before its last step; to continue, run this script again\n"
    )


def test_the_other_scripts_end_with_the_first_run_that_was_stopped(tmp_path):
    """Regression: wsd.sh forked a run from a step that it had not reached."""
    folder = tmp_path / "repo"
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copytree(ROOT / "runs", folder / "runs")
    executable(
        folder / ".venv" / "bin" / "python",
        STAND_IN.format(download="true", failing="scripts.status", fail="exit 10"),
    )
    calls = tmp_path / "calls"
    environment = {
        "TINY": "1",
        "CALLS": str(calls),
        "NANOCHAT_BASE_DIR": str(tmp_path),
        "DRY_RUN": "",
    }
    result = subprocess.run(
        ["bash", "runs/wsd.sh"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 10 and result.stderr.endswith(
        "the run stable was stopped before its last step; to continue, run this script again\n"
    )
    called = re.findall(r"-m (\S+)", calls.read_text())
    assert called[-2:] == ["scripts.base_train", "scripts.status"]
    assert called.count("scripts.base_train") == 1


def test_a_failed_stage_stops_the_script_and_its_time_is_recorded(tmp_path):
    result, called = run_stages(tmp_path, "cpu", failing="base_train")
    assert result.returncode == 7 and "stage 'training' failed (7)" in result.stderr
    assert called == ["dev.make_sample_corpus", "scripts.tok_train", "scripts.base_train"]
    lines = (tmp_path / "speedrun-cpu-stages.tsv").read_text().splitlines()
    assert [line.split("\t")[::2] for line in lines] == [
        ["set-up", "0"],
        ["sample corpus", "0"],
        ["tokenizer", "0"],
        ["training", "7"],
    ]


@pytest.mark.parametrize(
    ("download", "code", "rest"),
    [
        (
            "true",
            0,
            ["scripts.base_train", "scripts.status", "scripts.base_eval", "scripts.report"],
        ),
        ("echo gone; exit 5", 5, []),
    ],
    ids=["works", "fails"],
)
def test_training_waits_for_the_download_and_does_not_start_if_it_fails(
    tmp_path, download, code, rest
):
    result, called = run_stages(tmp_path, "gpu", download=f"sleep 0.3; {download}")
    assert result.returncode == code and ("gone" in result.stderr) == (code == 5)
    assert called[0] == "nanochat.dataset" and called[4:] == rest
    assert sorted(called[1:4]) == ["nanochat.dataset", "scripts.tok_eval", "scripts.tok_train"]


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_the_download_ends_with_the_script(tmp_path):
    """The tokenizer fails only after the download has started."""
    result, _ = run_stages(
        tmp_path,
        "gpu",
        download=f"echo $$ >{tmp_path}/pid; exec sleep 60",
        failing="tok_train",
        fail=f"until [[ -s {tmp_path}/pid ]]; do :; done; exit 7",
    )
    assert result.returncode == 7
    pid = (tmp_path / "pid").read_text().strip()
    for _ in range(200):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True
        ).stdout.strip()
        if not state or state.startswith("Z"):
            return
    pytest.fail("the download still runs")


# ---- setup.sh ------------------------------------------------------------------------------------


@pytest.fixture
def setup(tmp_path):
    """Runs dev/setup.sh in a copy of the project, with `executable` files added to the PATH
    first."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("dev/setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)

    def run(executables=None, **environment):
        for name, text in (executables or {}).items():
            executable(tmp_path / "bin" / name, f"#!/bin/sh\n{text}\n")
        kept = {key: value for key, value in os.environ.items() if key != "TORCH"}
        path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} if executables else {}
        return subprocess.run(
            ["bash", "dev/setup.sh"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**kept, **path, **environment},
        )

    return run


def test_setup_refuses_an_interpreter_without_torch_for_an_installed_torch(setup, tmp_path):
    python = f'exec {sys.executable} -S "$@"'  # without its packages
    done = setup(
        {"bare-python": python}, TORCH="installed", PYTHON=str(tmp_path / "bin" / "bare-python")
    )
    assert done.returncode == 1 and "has no torch; choose one that has" in done.stderr, done.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_uses_uv_if_it_exists_but_pip_in_an_environment_made_by_pip(setup, tmp_path):
    uv = (
        f'echo "$@" >>{tmp_path}/calls\nmkdir -p .venv/bin\n'
        f'printf \'#!/bin/sh\\n[ "$2" != pip ] && exec {sys.executable} "$@"\' >.venv/bin/python\n'
        f"chmod +x .venv/bin/python"
    )
    for _ in range(2):  # the second run has nothing to do
        done = setup({"uv": uv}, PYTHON="python3.12")
        assert done.returncode == 0, done.stderr
    assert [
        line for line in (tmp_path / "calls").read_text().splitlines() if "version" not in line
    ] == ["sync --inexact --extra dev --python python3.12"]
    (tmp_path / ".venv/bin/python").write_text(
        f'#!/bin/sh\n[ "$2 $3" != "pip install" ] && exec {sys.executable} "$@"'
    )
    (tmp_path / ".venv/.setup-stamp").unlink()
    done = setup({"uv": uv}, PYTHON="python3.12")
    assert done.returncode == 1 and "could not install .venv/requirements-torch.txt" in done.stderr


def test_setup_shows_the_progress_of_a_long_install(setup):
    done = setup(
        {
            "uv": "[ $1 = --version ] && echo uv 1 && exit\necho Downloading torch\nsleep 0.5\n"
            f"mkdir -p .venv/bin && ln -sf {sys.executable} .venv/bin/python"
        },
        SETUP_PROGRESS_S="0.05",
    )
    assert done.returncode == 0 and re.search(
        r"setup: installing uv.lock, \d+ s: Downloading torch", done.stdout
    ), done


# ---- the lock file and the machine ---------------------------------------------------------------


def test_the_lock_file_fits_the_project_and_names_only_public_hosts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    [ours] = [
        package for package in tomllib.loads(text)["package"] if package["name"] == project["name"]
    ]
    locked = {
        (entry["name"], tuple(entry.get("extras", ())), entry.get("specifier", ""))
        for entry in ours["metadata"]["requires-dist"]
    }
    required = {
        Requirement(line)
        for lines in (project["dependencies"], *project["optional-dependencies"].values())
        for line in lines
    }
    assert locked == {
        (canonicalize_name(r.name), tuple(r.extras), str(r.specifier)) for r in required
    }
