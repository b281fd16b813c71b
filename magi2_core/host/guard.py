"""Runs ComfyUI's main.py in this process and ends it when the pipe on standard input closes.

Started by start.py as a plain file with the server's interpreter: `python guard.py main.py ARGUMENTS`. Whoever started it holds
the other end of the pipe, so the server cannot outlive its starter, however that ends; it first gets the stop that Ctrl-C
gives, then is ended. Standard library only; nothing of the pack is imported.
"""

import os
import runpy
import signal
import sys
import threading
import time

GRACE_SECONDS = 15.0


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1024):
        pass
    if os.name == "posix":
        os.kill(os.getpid(), signal.SIGINT)  # to the process, so that the main thread wakes; raise_signal would hit this thread
    else:
        signal.raise_signal(signal.SIGINT)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> None:
    """Starts the watch and becomes ComfyUI."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a starter in the background of a shell hands down "ignore"
    script = os.path.abspath(sys.argv[1])
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_watch, args=(pipe,), name="magi2-guard", daemon=True).start()
    sys.argv = [script, *sys.argv[2:]]
    sys.path[0] = os.path.dirname(script)
    os.chdir(sys.path[0])
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
