import signal
import sys

# Ctrl-C while a command imports PyTorch ends it without a traceback; run_main turns exceptions on again.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
