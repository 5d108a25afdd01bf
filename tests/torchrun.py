"""torchrun without its start-up: the launcher is forked from the server of tests/training.py, and so are its workers.

    with quick_python() as python:                            # an executable that torchrun takes for Python
        process = start(argv, {**env, "PYTHON_EXEC": python}, output)

The launcher is torch's own, and a worker, as far as it can tell, is a child that runs `python -u -m MODULE ARGS`. That
child is a few lines that import nothing. They send their arguments, environment and files over a socket to a process
that has loaded everything, which forks; they pass signals on to what was forked, and end as it ends:

    launcher --- worker (quick_python) ~~~ socket ~~~ answer() --- the module, as __main__
"""

import contextlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests import training

ROOT = Path(__file__).parent.parent
WORKER = """#!{python} -IS
import json, os, signal, socket, sys
request = {address!r} + "." + str(os.getpid())
with open(request, "w") as file:
    json.dump([sys.argv[sys.argv.index("-m") + 1:], dict(os.environ), os.getcwd()], file)
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [request.encode()], [1, 2])
    pid = int(server.recv(32))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int(server.recv(32))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


# ---- the launcher ---------------------------------------------------------------------------------------------------

def _take_over(env: dict[str, str], out: int, err: int) -> None:
    """Make a forked process look like a new one."""
    os.environ.clear()
    os.environ.update(env)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(ROOT)


def _launcher(argv: list[str], env: dict[str, str], output: str) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _take_over({**env, "PYTHONPATH": str(ROOT)}, fd, fd)
    from torch.distributed.run import main

    os.setsid()
    main(argv)


def start(argv: list[str], env: dict[str, str], output: Path) -> Any:
    """The command torchrun with these arguments; what it and its workers print goes to a file."""
    process = training.server().Process(target=_launcher, args=(argv, env, str(output)))
    process.start()
    return process


# ---- its workers ----------------------------------------------------------------------------------------------------

def _run(argv: list[str], env: dict[str, str], fds: list[int]) -> None:
    """Run a module as `python -m` does, and end."""
    _take_over(env, *fds)
    torch.set_num_threads(1)
    sys.argv = argv
    code: Any = 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e:
        code = e.code
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _answer(connection: socket.socket) -> None:
    """Fork one worker, tell its pid, and later its exit code; kill it if whoever asked is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, fds, _, _ = socket.recv_fds(connection, 4096, 2)
    argv, env, _ = json.loads(Path(request.decode()).read_text())
    if (pid := os.fork()) == 0:
        connection.close()
        _run(argv, env, fds)
    for fd in fds:
        os.close(fd)
    connection.sendall(str(pid).encode())
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if select.select([connection], [], [], 0.02)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os._exit(0)
    connection.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
    os._exit(0)


def _serve(address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address + ".new")
        listener.listen()
        os.rename(address + ".new", address)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _answer(connection)
            connection.close()


@contextlib.contextmanager
def quick_python() -> Iterator[Path]:
    """An executable that starts a module as `python -u -m` does, with all that is slow to load loaded."""
    folder = Path(tempfile.mkdtemp(prefix="python-"))  # a short path: that of a socket may have 107 characters
    address, python = str(folder / "socket"), folder / "python"
    python.write_text(WORKER.format(python=sys.executable, address=address))
    python.chmod(0o755)
    process = training.server().Process(target=_serve, args=(address,), daemon=True)
    process.start()
    end = time.monotonic() + training.PATIENCE_S
    while not os.path.exists(address) and process.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    try:
        yield python
    finally:
        process.kill()
        process.join()
        shutil.rmtree(folder)
