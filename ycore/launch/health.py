"""Whether an engine answers: one request over its unix socket, with the standard library.

Not here: everything else that is asked of an engine (`roles.vllm_engine`).
"""

import http.client
import socket
from pathlib import Path


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(str(self._path))


def is_healthy(path: Path, *, timeout_s: float = 1.0) -> bool:
    """Whether the server behind the socket says it is ready, within `timeout_s`; one that sleeps is."""
    return path.exists() and says_ok(path, "GET", "/health", timeout_s=timeout_s)


def says_ok(path: Path, method: str, route: str, *, timeout_s: float) -> bool:
    """Whether it answers this with status 200, within `timeout_s`."""
    connection = _UnixConnection(path, timeout_s=timeout_s)
    try:
        connection.request(method, route)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
