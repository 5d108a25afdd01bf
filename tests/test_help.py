"""scripts.help: the list of commands, running one by its name, and shell completion."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import help as help_

SCRIPTS = Path(help_.__file__).parent


def test_every_script_is_listed_once_with_its_sentence(capsys):
    assert help_.main([]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    listed = [line.split()[0] for line in lines]
    modules = [module.removeprefix("scripts.") for module in help_.commands().values()]
    assert sorted(listed) == sorted(modules) and len(listed) == len(list(SCRIPTS.glob("[!_]*.py"))) + 1
    assert {"base_train", "base_eval", "nanochat.dataset", "tok_shards"} <= set(listed)
    assert all(len(line) < 120 and len(line.split()) > 3 for line in lines)


def test_a_command_is_run_with_its_flags_and_its_exit_code(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    assert help_.main(["status"]) == 0 and "no runs" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        help_.main(["stop", "--help"])
    assert "usage: nanochat stop" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        help_.main(["help", "stop"])
    assert "usage: nanochat stop" in capsys.readouterr().out
    for name in ("tok_train", "tok-train", "base_train", "train"):  # the modules' names, too
        with pytest.raises(SystemExit, match="0"):
            help_.main(["help", name])
    for words in (["trian"], ["help", "trian"]):
        with pytest.raises(ValueError, match="trian: unknown command; did you mean train"):
            help_.main(words)
    with pytest.raises(ValueError, match="xyzzy: unknown command"):
        help_.main(["xyzzy"])


def test_completion_knows_commands_flags_and_choices(capsys, monkeypatch):
    assert help_.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for word in ("tok-shards", "--window-pattern", "crop split", "_inspect_data_rows"):
        assert word in script, word
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ValueError, match=r"shtab is not installed; pip install -e '\.\[cli\]'"):
        help_.main(["completion", "zsh"])


def test_if_a_package_is_missing_a_command_names_the_set_up():
    ended = subprocess.run([sys.executable, "-S", "-m", "scripts.base_train"], capture_output=True, text=True,
                           cwd=SCRIPTS.parent)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: No module named '\w+' in .*; run `bash dev/setup.sh`, then "
                        r"`source .venv/bin/activate`\n", ended.stderr)
