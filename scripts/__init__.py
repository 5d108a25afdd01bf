import signal
import sys
from types import TracebackType

if sys.argv[0] == "-m":  # a command, not an import by another program
    # Ctrl-C while a command imports PyTorch ends it without a traceback. Later, run_main makes it
    # an exception again.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def explain(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Name the set-up if a package is missing. A command imports only what it needs."""
        if isinstance(error, ModuleNotFoundError):
            print(
                f"error: {error} in {sys.executable}; run `bash dev/setup.sh`, then `source .venv/bin/activate`",
                file=sys.stderr,
            )
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = explain
