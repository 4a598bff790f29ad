"""A flow model as a policy, and the engine that draws pictures with it in the trainer's process.

A picture is a completion whose text is a reference: the PNG in the run's store, by sha256, and the row of a file of
trajectories. Neither JSON nor the journal holds a value of a picture.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from ycore.engine import Engine
from ycore.engine.transformers_engine import Batches
from ycore.errors import ModelError
from ycore.flow.flow_inputs import FlowFolder
from ycore.flow.flow_math import DrawnPictures, SamplingPath, draw, window_of
from ycore.rollout.turns import Generate, GroupStart, SingleTurnWriter, completion_seed
from ycore.run.files import RunFolder, make_folder, read_named, write_bytes_atomic
from ycore.run.images import ImageStore, png_of
from ycore.types import Completion, Image, Prompt, from_json

Weights = Mapping[str, torch.Tensor]
"""The trained weights by name: the policy's, an older policy's, or the reference's."""

_SCALE = 1000.0  # of times, as diffusers' networks take them


class FlowPolicy:
    """The network, always in evaluation mode: in training mode a DiT drops a tenth of its labels, and trainer and
    sampler would disagree.
    """

    def __init__(self, folder: FlowFolder, *, device: str = "cpu") -> None:
        self.folder = folder
        self.device = torch.device(device)
        self.network = folder.load()
        self.network.eval().to(self.device)
        self.trained = {
            name: weight
            for name, weight in self.network.named_parameters()
            if weight.requires_grad
        }
        self.reference = self.copy()

    def copy(self) -> dict[str, torch.Tensor]:
        """Copy the trained weights."""
        return {name: weight.detach().clone() for name, weight in self.trained.items()}

    def put(self, weights: Weights) -> None:
        """Set the trained weights; ModelError for those of another model."""
        if weights.keys() != self.trained.keys():
            raise ModelError(
                "the weights are of another model; give the model that the run began with"
            )
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(weights[name])

    def velocity(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        classes: torch.Tensor,
        weights: Weights | None = None,
    ) -> torch.Tensor:
        """Return [B, C, H, W] in float32, at times [B] for classes [B]; with `weights` instead of the policy's own."""
        inputs = (x.to(self.device), times.to(self.device) * _SCALE)
        named = {"class_labels": classes.to(self.device), "return_dict": False}
        outputs = torch.func.functional_call(self.network, dict(weights or {}), inputs, named)
        v: torch.Tensor = outputs[0].float()
        return v

    def save(self, root: Path) -> None:
        """Write a folder that `--model` takes."""
        self.network.save_pretrained(root / self.folder.part)
        scheduler = root / "scheduler" / "scheduler_config.json"
        scheduler.parent.mkdir(parents=True, exist_ok=True)
        scheduler.write_bytes((self.folder.root / "scheduler" / scheduler.name).read_bytes())


# -- pictures ----------------------------------------------------------------------------------------------------------

NOWHERE = -1
"""In place of the first step with noise: none, as where the model is measured."""

JOIN_S = 0.002  # from a request to its batch, for those of the other groups


@dataclass(frozen=True)
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
        """Read it from a completion's text."""
        return from_json(cls, json.loads(text))

    def as_text(self) -> str:
        return json.dumps(asdict(self))


class Trajectories:
    """Files of tensors named by their sha256: `pictures`, `points` and `logprobs` of one batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Keep tensors, on the disk on return, and return their name."""
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        name = hashlib.sha256(data).hexdigest()
        make_folder(self._folder)
        write_bytes_atomic(self._folder / name, data)
        return name

    def get(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors; RunFolderError where they are gone or have changed."""
        tensors: dict[str, torch.Tensor] = load(
            read_named(self._folder / name, way_out="resume from 0")
        )
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
        path: of a round's pictures; `plain`: of those that measure the model.
        batch: pictures that the network takes at once.
    """

    name = "sampler"

    def __init__(
        self,
        policy: FlowPolicy,
        path: SamplingPath,
        plain: SamplingPath,
        folder: RunFolder,
        *,
        batch: int,
    ) -> None:
        self.weights: Weights | None = None
        """Weights to draw with; None for the policy's own."""
        self.num_drawn = 0
        self._policy = policy
        self._path = path
        self._plain = plain
        self._batch = batch
        self._images = ImageStore(folder.images)
        self._trajectories = Trajectories(folder.trajectories)
        self._batches = Batches[_Request](
            self._draw, kind=lambda request: request.measures, most=batch, wait_s=JOIN_S
        )

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

    def _draw(self, requests: Sequence[_Request]) -> list[Completion]:
        measures = requests[0].measures
        filled = [*requests, *[requests[0]] * (self._batch - len(requests))]
        classes = torch.tensor([request.label for request in filled])
        drawn = draw_pictures(
            self._policy,
            self._plain if measures else self._path,
            classes,
            [request.seed for request in filled],
            firsts=[request.first for request in filled],
            weights=self.weights,
        )
        size = len(requests)
        self.num_drawn += size
        kept = ""
        if not measures:
            tensors = {
                "pictures": drawn.pictures[:size],
                "points": drawn.points[:size],
                "logprobs": drawn.logprobs[:size],
            }
            kept = self._trajectories.put(tensors)
        completions = []
        for row, (request, values) in enumerate(zip(requests, drawn.pictures, strict=False)):
            image = self._images.put(png_of(as_pil(values)), "a drawn picture", durable=False)
            text = Picture(image, kept, row, request.first).as_text()
            completions.append(Completion((), None, text, "stop", self.version))
        return completions


class OnePicture(SingleTurnWriter):
    """A completion is one request, with the class and the place of the group's steps with noise."""

    def __init__(self, path: SamplingPath) -> None:
        self._path = path

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        position = start.draw.position
        first = window_of(
            seed, position, num_steps=self._path.num_steps, length=self._path.length
        )
        picture_seed = completion_seed(seed, position, index)
        return await generate((*start.draw.token_ids, first), picture_seed)


def draw_pictures(
    policy: FlowPolicy,
    path: SamplingPath,
    classes: torch.Tensor,
    seeds: Sequence[int],
    *,
    firsts: Sequence[int] = (),
    weights: Weights | None = None,
) -> DrawnPictures:
    """Draw a picture of each class, with `weights` instead of the policy's own; noise and steps are on the CPU."""

    def velocity(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return policy.velocity(x, times, classes, weights).cpu()

    with torch.no_grad():
        return draw(velocity, path, seeds, policy.folder.shape, firsts=firsts)


def as_pil(values: torch.Tensor) -> Any:
    """Return a picture [C, H, W] in [-1, 1] as PIL has it, in grey or in colours of 8 bits."""
    from PIL import Image as Pillow

    bytes_ = ((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Pillow.fromarray(
        bytes_[0].numpy() if len(bytes_) == 1 else bytes_.permute(1, 2, 0).numpy()
    )
