"""The sampler as an engine: references instead of pixels, batches that change nothing, files that go when unused."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from ycore.errors import RunFolderError
from ycore.flow.flow_inputs import FlowFolder
from ycore.flow.flow_math import SamplingPath, time_grid
from ycore.flow.picture_rounds import (
    FlowPolicy,
    Picture,
    PictureEngine,
    Trajectories,
    contact_sheet,
    drop_pictures,
)
from ycore.run.files import ImageStore, RunFolder


def engine_in(root: Path, model: Path, *, batch: int = 4) -> PictureEngine:
    path = SamplingPath(time_grid(4), "sde", 0.7, length=2)
    return PictureEngine(
        FlowPolicy(FlowFolder(model)),
        path,
        SamplingPath(time_grid(5)),
        ImageStore(root / "images"),
        Trajectories(root / "trajectories"),
        batch,
    )


def ask(
    engine: PictureEngine, *requests: tuple[int, int, int], greedy: bool = False
) -> list[Picture]:
    async def all_of_them() -> list[Picture]:
        completions = [
            engine.complete((label, first), seed, greedy=greedy)
            for label, first, seed in requests
        ]
        return [
            Picture.of(completion.text) for completion in await asyncio.gather(*completions)
        ]

    return asyncio.run(all_of_them())


def test_a_picture_is_a_reference_and_the_same_in_any_batch(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = engine_in(tmp_path, tiny_model)
    many = ask(engine, *[(number % 3, number % 2, 100 + number) for number in range(7)])
    (alone,) = ask(engine_in(tmp_path, tiny_model), (2, 1, 105))
    assert alone.image == many[5].image and engine.num_drawn == 7
    assert ImageStore(tmp_path / "images").open(alone.image.sha256).size == (4, 4)
    kept = Trajectories(tmp_path / "trajectories")
    alone_trajectory, batch_trajectory = kept.get(alone.kept), kept.get(many[5].kept)
    for name in ("pictures", "points", "logprobs"):
        assert torch.equal(
            alone_trajectory[name][alone.row], batch_trajectory[name][many[5].row]
        )
    text = alone.as_text()
    assert Picture.of(text) == alone and len(text) < 250 and json.loads(text)["first"] == 1


def test_measuring_keeps_nothing_to_learn_from_and_has_no_noise_in_its_steps(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = engine_in(tmp_path, tiny_model)
    (measured,) = ask(engine, (1, -1, 3), greedy=True)
    assert measured.kept == "" and not (tmp_path / "trajectories").exists()
    (again,) = ask(engine, (1, -1, 3), greedy=True)
    assert again == measured


def test_other_weights_draw_other_pictures_from_the_same_seed(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = engine_in(tmp_path, tiny_model)
    (before,) = ask(engine, (0, 0, 1))
    engine.weights = {name: weight + 0.1 for name, weight in engine.policy.reference.items()}
    (after,) = ask(engine, (0, 0, 1))
    assert before.image != after.image


def test_a_failure_reaches_everyone_who_waits(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        ask(engine_in(tmp_path, tiny_model), (99, 0, 1), (0, 0, 2))


def test_a_trajectory_that_has_changed_is_an_error(tmp_path: Path) -> None:
    kept = Trajectories(tmp_path)
    name = kept.put({"pictures": torch.ones(1)})
    assert torch.equal(kept.get(name)["pictures"], torch.ones(1))
    (tmp_path / name).write_bytes(b"other")
    with pytest.raises(RunFolderError, match="was changed"):
        kept.get(name)
    with pytest.raises(RunFolderError, match="cannot be read"):
        kept.get("0" * 64)


def test_only_what_journal_and_checkpoints_name_is_kept(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    kept, dropped = ask(engine_in(tmp_path, tiny_model, batch=1), (0, 0, 1), (1, 0, 2))
    folder.journal.mkdir()
    (folder.journal / "round-000001-rank-0.json").write_text(
        json.dumps({"text": kept.as_text()})
    )
    drop_pictures(folder)
    left = {
        path.name for place in (folder.images, folder.trajectories) for path in place.iterdir()
    }
    assert left == {kept.image.sha256, kept.kept} and dropped.kept not in left


def test_the_sheet_shows_both_models_from_the_same_noise(
    tiny_model: Path, tmp_path: Path
) -> None:
    policy = FlowPolicy(FlowFolder(tiny_model))
    contact_sheet(policy, SamplingPath(time_grid(3)), [0, 2], tmp_path / "pictures.png")
    assert (tmp_path / "pictures.png").read_bytes()[:4] == b"\x89PNG"
