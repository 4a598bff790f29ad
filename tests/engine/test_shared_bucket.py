"""Weights in a bucket that is filled again and again. On a device it was never tried."""

from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from ycore.engine import WeightSource, shared_bucket
from ycore.engine.shared_bucket import Bucket, Entry, opened, weights_in
from ycore.engine.weight_proof import tensor_sums
from ycore.errors import SyncError

CPU = torch.device("cpu")
WEIGHTS = {
    "odd": torch.arange(7, dtype=torch.bfloat16),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).T,
    "scalar": torch.tensor(3.0),
    "large": torch.randn(5, 40, generator=torch.Generator().manual_seed(0)),
}


def bucket_in(folder: Path) -> Bucket:
    sums = {name: tensor_sums(weight) for name, weight in WEIGHTS.items() if weight.dim()}
    return Bucket(
        WeightSource(lambda: iter(WEIGHTS.items()), CPU), sums, folder / "rollout-0.bucket"
    )


def test_weights_come_out_as_they_went_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket of 128 bytes, or of the largest weight; what was read is a copy."""
    monkeypatch.setattr(shared_bucket, "BUCKET_BYTES", 128)
    bucket = bucket_in(tmp_path)
    memory = opened(bucket.handle, bucket.num_bytes, CPU)
    assert bucket.num_bytes == len(memory) == 800
    read: dict[str, torch.Tensor] = {}
    filled: list[list[Entry]] = []
    for entries in bucket.fill():
        filled.append(entries)
        read |= dict(weights_in(memory, entries))
    assert [[name for name, *_ in entries] for entries in filled] == [
        ["odd", "turned", "scalar"],
        ["large"],
    ]
    assert list(read) == list(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert read[name].dtype == weight.dtype and torch.equal(read[name], weight)


def test_memory_that_is_less_than_was_said_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_bucket, "BUCKET_BYTES", 4096)
    bucket = bucket_in(tmp_path)
    with pytest.raises(SyncError, match=r"rollout-0.bucket has 4096 bytes and not 4097"):
        opened(bucket.handle, 4097, CPU)


def test_a_machine_without_room_for_a_bucket_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check the first byte beyond the room ends the process by SIGBUS."""
    monkeypatch.setattr(shared_bucket, "BUCKET_BYTES", 2**55)
    with pytest.raises(
        SyncError, match=rf"a bucket of {2**25}.00 GiB for weights: .*rollout-0.bucket"
    ):
        bucket_in(tmp_path)


def test_a_weight_that_the_policy_lacks_now_ends_the_walk(tmp_path: Path) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "odd", WEIGHTS["odd"]
        raise SyncError("gone")

    with pytest.raises(SyncError, match="gone"):
        list(Bucket(WeightSource(weights, CPU), {}, tmp_path / "bucket").fill())


def test_torch_still_has_the_device_where_it_is_replaced() -> None:
    assert (
        list(signature(rebuild_cuda_tensor).parameters)[shared_bucket._DEVICE]
        == "storage_device"
    )
