import signal
import sys

# Ctrl-C while a command imports PyTorch ends it without a traceback. Later, run_main makes it an exception again.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
