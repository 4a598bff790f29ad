"""The sampler: an `Engine` that draws pictures in batches, in the trainer's process and with the trainer's weights.

A picture is a completion whose text is a reference: the PNG in the run's store, by sha256, and the row of a file of
trajectories. Neither JSON nor the journal holds a value of a picture.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from ycore.engine import Engine
from ycore.engine.batching import Batches
from ycore.errors import RunFolderError
from ycore.flow.denoising import NOISY, Sampling, draw, window_of
from ycore.flow.policy import FlowPolicy, Weights
from ycore.rollout.turns import Generate, GroupStart, SingleTurnWriter, completion_seed
from ycore.run.files import make_folder, write_bytes_atomic
from ycore.run.images import ImageStore, png_of
from ycore.run.paths import RunFolder
from ycore.types import Completion, Image, Prompt

NOWHERE = -1
"""In place of the first step with noise: none, as where the model is measured."""

JOIN_S = 0.002  # from a request to its batch, for those of the other groups


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn picture by reference: its PNG, and its row in the file of trajectories with that sha256.

    `first` is its first step with noise. `kept` is "" where nothing learns from it.
    """

    image: Image
    kept: str
    row: int
    first: int

    @classmethod
    def of(cls, text: str) -> "Picture":
        """From a completion's text."""
        value = json.loads(text)
        return cls(**{**value, "image": Image(*value["image"])})

    def as_text(self) -> str:
        return json.dumps(asdict(self) | {"image": list(self.image)})


class Trajectories:
    """Files of tensors named by their sha256: `pictures`, and with noise `points` and `logprobs`, of one batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Keep them, on the disk on return; their name."""
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        name = hashlib.sha256(data).hexdigest()
        make_folder(self._folder)
        write_bytes_atomic(self._folder / name, data)
        return name

    def get(self, name: str) -> dict[str, torch.Tensor]:
        """RunFolderError where they are gone or have changed."""
        path = self._folder / name
        try:
            data = path.read_bytes()
        except OSError as problem:
            raise RunFolderError(
                f"a trajectory of the journal cannot be read ({problem}); resume from 0"
            ) from None
        if hashlib.sha256(data).hexdigest() != name:
            raise RunFolderError(
                f"{path} has changed: its sha256 is not its name; resume from 0"
            )
        tensors: dict[str, torch.Tensor] = load(data)
        return tensors


class _Request(NamedTuple):
    label: int
    first: int
    seed: int

    @property
    def measures(self) -> bool:
        return self.first == NOWHERE


class PictureEngine(Engine):
    """An `Engine` whose prompt is a class and the first step with noise. Simultaneous requests share a batch.

    Every batch has the same size, filled up with what is thrown away: then a picture does not depend on how many
    others were asked for with it.

    Args:
        sampling: of a round's pictures; `plain`: of those that measure the model.
        batch: pictures that the network takes at once.
    """

    name = "sampler"

    def __init__(
        self,
        policy: FlowPolicy,
        sampling: Sampling,
        plain: Sampling,
        folder: RunFolder,
        *,
        batch: int,
    ) -> None:
        self.version = 0
        self.weights: Weights | None = None
        """Weights to draw with; None for the policy's own."""
        self.num_drawn = 0
        self._policy = policy
        self._sampling = sampling
        self._plain = plain
        self._batch = batch
        self._images = ImageStore(folder.images)
        self._trajectories = Trajectories(folder.trajectories)
        self._batches = Batches[_Request](
            self._draw, kind=lambda request: request.measures, most=batch, wait_s=JOIN_S
        )

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Nothing to wait for."""

    async def load_weights(self, folder: Path, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        """Nothing to close."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool = False,
        max_tokens: int | None = None,
        prompt: Prompt | None = None,
    ) -> Completion:
        """Draw a picture; `greedy` measures: without noise in its steps, and nothing is kept to learn from."""
        label, first = prompt_ids
        return await self._batches.ask(_Request(label, NOWHERE if greedy else first, seed))

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        raise NotImplementedError("a picture has no tokens")

    def _draw(self, requests: Sequence[_Request]) -> list[Completion]:
        measures = requests[0].measures
        sampling = self._plain if measures else self._sampling
        filled = [*requests, *[requests[0]] * (self._batch - len(requests))]
        classes = torch.tensor([request.label for request in filled])
        with torch.no_grad():
            drawn = draw(
                partial(_velocity, self._policy, classes, self.weights),
                sampling,
                [request.seed for request in filled],
                self._policy.folder.shape,
                firsts=[max(0, request.first) for request in filled],
            )
        size, kept = len(requests), ""
        self.num_drawn += size
        if not measures:
            tensors = {"pictures": drawn.pictures[:size]}
            if sampling.rule in NOISY:
                tensors["points"] = drawn.points[:size]
                tensors["logprobs"] = drawn.logprobs[:size]
            kept = self._trajectories.put(tensors)
        completions = []
        for row, (request, values) in enumerate(zip(requests, drawn.pictures, strict=False)):
            image = self._images.put(png_of(as_pil(values)), "a drawn picture", durable=False)
            text = Picture(image, kept, row, request.first).as_text()
            completions.append(Completion((), None, text, "stop", self.version))
        return completions


def _velocity(
    policy: FlowPolicy,
    classes: torch.Tensor,
    weights: Weights | None,
    x: torch.Tensor,
    times: torch.Tensor,
) -> torch.Tensor:
    """On the CPU, where the noise is drawn and the steps are made."""
    return policy.velocity(x, times, classes, weights).cpu()


def as_pil(values: torch.Tensor) -> Any:
    """A picture [C, H, W] in [-1, 1] as PIL has it, in grey or in colours of 8 bits."""
    from PIL import Image as Pillow

    bytes_ = ((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Pillow.fromarray(
        bytes_[0].numpy() if len(bytes_) == 1 else bytes_.permute(1, 2, 0).numpy()
    )


class OnePicture(SingleTurnWriter):
    """A completion is one request, with the class and the place of the group's steps with noise."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        sampling, position = self._sampling, start.draw.position
        num_steps = sampling.path.num_steps
        first = window_of(seed, position, num_steps=num_steps, length=sampling.length)
        picture_seed = completion_seed(seed, position, index)
        return await generate((*start.draw.token_ids, first), picture_seed)


def drop_pictures(folder: RunFolder) -> int:
    """Delete pictures and trajectories that no round of the journal and no checkpoint refers to; how many went."""
    rounds = folder.journal.glob("round-*.json")
    states = folder.checkpoints.glob("*/controller-*.json")
    references = b"".join(path.read_bytes() for path in (*rounds, *states))
    num_deleted = 0
    for place in (folder.images, folder.trajectories):
        for path in place.iterdir() if place.is_dir() else ():
            if os.fsencode(path.name) not in references:
                path.unlink(missing_ok=True)
                num_deleted += 1
    return num_deleted


def contact_sheet(
    policy: FlowPolicy,
    sampling: Sampling,
    classes: Sequence[int],
    path: Path,
    *,
    num_each: int = 8,
) -> None:
    """A PNG with `num_each` pictures of every class, by the model that the run began with and by the policy, side by
    side and from the same noise."""
    from ycore.view.pictures import new_figure, save_png

    labels = torch.tensor(classes).repeat_interleave(num_each)
    seeds = [completion_seed(0, NOWHERE, number) for number in range(len(labels))]
    figure = new_figure(9, 0.45 * len(classes) + 0.6)
    halves = (("before", policy.reference), ("after", None))
    for axes, (title, weights) in zip(figure.subplots(1, 2), halves, strict=True):
        velocity = partial(_velocity, policy, labels, weights)
        with torch.no_grad():
            pictures = draw(velocity, sampling, seeds, policy.folder.shape).pictures
        rows = pictures.clamp(-1, 1).unflatten(0, (len(classes), num_each))
        framed = torch.nn.functional.pad(rows, (1, 1, 1, 1), value=-1.0)
        # Rows of pictures beneath each other.
        sheet = framed.permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
        colours = "gray_r" if sheet.shape[-1] == 1 else None
        axes.imshow((sheet + 1) / 2, cmap=colours, vmin=0, vmax=1)
        axes.set_title(title, loc="left", fontsize=11)
        height = sheet.shape[0] / len(classes)
        middles = [(place + 0.5) * height for place in range(len(classes))]
        axes.set_yticks(middles, [str(label) for label in classes])
        axes.set_xticks([])
    save_png(figure, path)
