"""Serve a model with vLLM: `python -m ycore.engine.serve`, with the options of vLLM's own server.

Importing vLLM takes 7 s of a core. The engines of a CPU start as forks of one process that has imported it: with `--forks`
as its first word this module forks an engine for every order that comes over its standard input, a socket of
`launch.processes.ForkServer`.
"""

import gc
import json
import os
import socket
import sys
from contextlib import suppress

from ycore.run.reports import hide_packages


def main() -> None:
    gc.disable()  # what an import makes stays: a search for cycles takes a fifth of the time, and finds none
    with hide_packages(["sklearn"]):  # transformers needs it for assistant models alone
        from vllm.entrypoints.launchers.api_server.entry import main as serve

    gc.freeze()
    gc.enable()
    if sys.argv[1] == "--forks":
        _become_ordered_engine()
    serve()
    os._exit(0)  # without a last search for cycles in all that was imported


def _become_ordered_engine() -> None:
    """Fork an engine for each order, a child of the launcher, and return in the engine alone."""
    from setproctitle import setproctitle

    orders = socket.socket(fileno=0)
    while True:
        message, files, _, _ = socket.recv_fds(orders, 2**18, 1)
        if not message:
            os._exit(0)
        order = json.loads(message)
        if os.fork():
            if os.wait()[1]:
                os._exit(1)
            os.close(files[0])
        elif pid := os.fork():
            orders.send(json.dumps([order["name"], pid]).encode())
            os._exit(0)  # the launcher adopts the engine
        else:
            break
    os.setsid()
    setproctitle(f"ycore.engine.serve {order['name']}")
    os.dup2(os.open(os.devnull, os.O_RDONLY), orders.detach())
    for output in (1, 2):
        os.dup2(files[0], output)
    os.close(files[0])
    os.environ.update(order["environment"])
    with suppress(OSError):  # a container forbids it, which only costs speed
        os.sched_setaffinity(0, order["cores"])
    sys.argv[1:] = order["options"]


if __name__ == "__main__":
    main()
