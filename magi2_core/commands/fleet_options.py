"""The arguments of `serve`, `ps` and `kill`, and those of `generate` that choose a fleet. Standard library only: the help needs no torch."""

import argparse
from collections.abc import Callable
from typing import Any

COMMANDS = ("serve", "ps", "kill")

SERVE = """\
Keeps the model on all devices of this machine and serves it: ComfyUI and the command line attach to it, one job runs at a time. The
first job loads it. Runs until Ctrl-C, SIGTERM or `kill`. Prints the address to attach to.

examples:
  {program} serve --checkpoint /models/MAGI-2-preview
  {program} generate --backend attach --address unix:/run/user/1000/magi2/0123456789ab.sock --prompt "..."
"""

PS = """\
Lists this user's fleets on this machine, one JSON object a line: name (key), address, checkpoint, workers (ranks), layout, state
(idle: not loaded, warm: loaded, busy), jobs that wait, the running job, and the most host and device memory that a worker has taken (GB).

example:
  {program} ps
"""

KILL = """\
Ends a fleet, also in the middle of a job: the one that is named, or all. Asks first; one that does not answer is killed.

examples:
  {program} kill 0123456789ab
  {program} kill --all
"""


def add_commands(commands: Callable[[str, str, str], argparse.ArgumentParser], program: str) -> None:
    """Adds the three subcommands; `commands(name, summary, text)` makes a parser."""
    serve = commands("serve", "keep the model loaded and serve it to others", SERVE.format(program=program))
    serve.add_argument("--checkpoint", metavar="NAME|DIR", help="name or folder of a checkpoint (default: the embedded nano)")
    serve.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="arithmetic (default: auto)")
    serve.add_argument("--kernels", choices=("auto", "triton", "reference"), default="auto", help="which kernels (default: auto)")
    serve.add_argument(
        "--idle-minutes", type=float, default=30, metavar="N", help="give memory back after so long without work; 0 never (default: 30)"
    )
    serve.add_argument(
        "--step-seconds", type=float, default=900, metavar="N", help="a step longer than this counts as hung; 0 never (default: 900)"
    )
    serve.add_argument("--listen", default="", metavar="ADDRESS", help="tcp:HOST:PORT instead of a socket file; needs the printed token")
    add_devices(serve)
    commands("ps", "list running fleets", PS.format(program=program))
    kill = commands("kill", "end a fleet", KILL.format(program=program))
    kill.add_argument("key", nargs="?", default="", metavar="NAME", help="as `ps` lists it")
    kill.add_argument("--all", action="store_true", help="every fleet of this user")


def add_devices(parser: Any) -> None:
    """Adds the two options that say which devices a fleet has."""
    parser.add_argument("--devices", default="auto", metavar="LIST", help="devices of a fleet, as cuda:0,cuda:1 (default: auto, all)")
    parser.add_argument("--layout", default="auto", metavar="NAME", help="how the model is spread over them, as cp8ep4 (default: auto)")


def add_backend(group: Any) -> None:
    """Adds to `generate` where its stages run."""
    group.add_argument(
        "--backend",
        choices=("local", "auto", "keep", "attach"),
        default="local",
        help="local: this process (default). auto: workers of its own, one a device. keep: workers that stay for the next command. "
        "attach: a fleet that `serve` runs",
    )
    group.add_argument("--address", metavar="ADDRESS", help="of the fleet to attach to, as `serve` printed it")
    add_devices(group)
