"""A cable with a delay between two network namespaces: what one end sends, the other receives that much later.

    python -m tests.distributed.slow_link SPACE ADDRESS SPACE ADDRESS DELAY_MS

Each end is an interface `slow` (TAP). Its rate is shaped by `tc` from outside: this kernel needs no netem then.
"""

import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TCP4, _TCP6 = 1, 2, 4  # frames of 64 kB pass as one
_NEW_NETWORK = 0x40000000
_FRAME_BYTES = 2**17


def open_end(space: str, address: str) -> int:
    """Make an interface in the namespace and return its file."""
    with open(f"/var/run/netns/{space}", "rb") as home:
        if ctypes.CDLL(None, use_errno=True).setns(home.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFO | _OFFLOAD_HEADER
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"slow", flags))
    fcntl.ioctl(end, _TUNSETOFFLOAD, _CHECKSUM | _TCP4 | _TCP6)
    for words in (f"address add {address}/24 dev slow", "link set slow up"):
        subprocess.run(["ip", *words.split()], check=True, timeout=30)
    return end


def relay(ends: tuple[int, int], delay_s: float) -> None:
    """Pass frames on for ever; an end that cannot take one loses it, as a cable does."""
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    peers = {ends[0]: ends[1], ends[1]: ends[0]}
    selector = selectors.DefaultSelector()
    for end in ends:
        selector.register(end, selectors.EVENT_READ)
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        for key, _ in selector.select(None if due is None else due - time.monotonic()):
            frame = os.read(key.fd, _FRAME_BYTES)
            waiting[peers[key.fd]].append((time.monotonic() + delay_s, frame))
        for end, queue in waiting.items():
            while queue and queue[0][0] <= time.monotonic():
                os.write(end, queue.popleft()[1])


if __name__ == "__main__":
    first, first_address, second, second_address, delay_ms = sys.argv[1:]
    both = open_end(first, first_address), open_end(second, second_address)
    print("ready", flush=True)
    relay(both, float(delay_ms) / 1000)
