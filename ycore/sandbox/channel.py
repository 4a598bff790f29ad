"""The two pipes of a confined process to its parent: requests in, answers out, a JSON object a line."""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO


class Channel:
    """The pipes, moved away from the descriptors that Python, C and child processes use.

    Afterwards descriptor 0 is empty, and 1 and 2 are what the process prints, which is no message.
    """

    def __init__(self, answers: int) -> None:
        os.set_inheritable(answers, False)
        self._requests: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._replies: BinaryIO = os.fdopen(answers, "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.stdout = sys.stderr

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, self._requests)

    def reply(self, answer: dict[str, Any]) -> None:
        self._replies.write(json.dumps(answer).encode() + b"\n")
        self._replies.flush()
