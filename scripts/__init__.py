import importlib.util
import signal
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(f"error: {sys.executable} has no PyTorch; run `bash dev/setup.sh`, then `source .venv/bin/activate`")

# Ctrl-C while a command imports PyTorch ends it without a traceback. Later, run_main makes it an exception again.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
