"""Send weights to an engine of the same machine through shared memory: a bucket, filled again and again.

On a device the bucket is memory of the device, which CUDA IPC opens in the engine's process, so that no weight crosses
the bus. On a CPU it is a file in the run's shared memory, and all else is the same. (torch's own handles of CPU tensors
come with a process that serves them, and a killed run would leave both.) A bucket is filled anew once the engine has
said that it copied the last one, so a sync takes the bucket's memory and not the model's.

vLLM's own backend `ipc` is not used: on a CPU it asks CUDA for the device's name, and leaves the model half loaded. The
engine's side is `vllm_extension.PolicyWorker`, and the proof is that of files.
"""

import base64
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ycore.engine import WeightSource
from ycore.engine.weight_proof import TensorSums
from ycore.errors import SyncError

BUCKET_BYTES = 2**28  # or the largest weight, where it has more
_ALIGNED = 64
_DEVICE = 6  # of the arguments of `rebuild_cuda_tensor`: the device's number, which is another one in another process

Entry = tuple[str, str, list[int], int]
"""A weight in a bucket: checkpoint name, dtype, shape, first byte."""


class Bucket:
    """Memory that an engine opens by its `handle`; on a CPU it is in `file`."""

    def __init__(
        self, source: WeightSource, sums: Mapping[str, TensorSums], file: Path
    ) -> None:
        largest = max((tensor.num_bytes for tensor in sums.values()), default=0)
        self._weights = source.weights
        self.num_bytes = max(BUCKET_BYTES, largest)
        if source.device.type == "cuda":
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=source.device)
            # Whoever reaches the engine's socket, which is the user's own, may call its worker: pickle adds nothing.
            self.handle = base64.b64encode(
                pickle.dumps(reduce_tensor(self._memory)[1])
            ).decode()
            return
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A full /dev/shm is an error here, and not a SIGBUS later.
            os.posix_fallocate(descriptor, 0, self.num_bytes)
        except OSError as problem:
            raise SyncError(
                f"a bucket of {self.num_bytes / 2**30:.2f} GiB for weights: {problem.strerror}: {file}"
            ) from None
        finally:
            os.close(descriptor)
        self._memory = torch.from_file(
            str(file), shared=True, size=self.num_bytes, dtype=torch.uint8
        )
        self.handle = str(file)

    def fill(self) -> Iterator[list[Entry]]:
        """Yield the entries of the bucket each time that it is full and at the end; the next ones overwrite them."""
        entries: list[Entry] = []
        end = 0
        for name, weight in self._weights():
            if end + weight.nbytes > self.num_bytes:
                yield self._written(entries)
                entries = []
                end = 0
            self._memory[end : end + weight.nbytes].copy_(weight.reshape(-1).view(torch.uint8))
            entries.append(
                (name, str(weight.dtype).removeprefix("torch."), [*weight.shape], end)
            )
            end += -(-weight.nbytes // _ALIGNED) * _ALIGNED
        yield self._written(entries)

    def _written(self, entries: list[Entry]) -> list[Entry]:
        if self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)
        return entries


def opened(handle: str, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Open a bucket's memory in the engine; SyncError where it has fewer than `num_bytes`."""
    if device.type == "cuda":
        arguments = [*pickle.loads(base64.b64decode(handle))]
        arguments[_DEVICE] = device.index
        memory: torch.Tensor = rebuild_cuda_tensor(*arguments)
    elif (size := os.stat(handle).st_size) < num_bytes:
        raise SyncError(f"the bucket {handle} has {size} bytes and not {num_bytes}")
    else:
        memory = torch.from_file(handle, shared=True, size=num_bytes, dtype=torch.uint8)
    return memory


def weights_in(
    memory: torch.Tensor, entries: Iterable[Entry]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the weights, since vLLM keeps them until it has all of a layer."""
    for name, dtype_name, shape, begin in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        yield name, memory[begin : begin + num_bytes].clone().view(dtype).view(shape)
