"""The rounds of `ycore flow`: conditions are prompts, pictures are completions, scored as images.

Between them the model is measured: the same noise each time, the run's rewards beside a held-out judge, diversity. A
policy that has learned the mistakes of its reward shows there: the judge falls while the reward stays.

The engine draws pictures in the trainer's process. A picture is a completion whose text is a reference: the PNG in the
run's store, by sha256, and the row of a file of trajectories. Neither JSON nor the journal holds a value of a picture.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ycore.engine import Engine
from ycore.engine.transformers_engine import Batches
from ycore.errors import ModelError
from ycore.evaluation.held_out import RIGHT_FROM, as_metrics, with_interval
from ycore.flow.flow_inputs import FlowFolder
from ycore.flow.flow_math import DrawnPictures, SamplingPath, draw
from ycore.flow.flow_settings import FlowConfig
from ycore.rewards.loading import reward_names
from ycore.rollout.turns import Generate, GroupStart, SingleTurnWriter, completion_seed
from ycore.round.step import Controller
from ycore.run.files import (
    ImageStore,
    RunFolder,
    make_folder,
    png_of,
    read_named,
    write_bytes_atomic,
)
from ycore.run.tasks import together
from ycore.scoring.group_rewards import total_reward, without_none
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Completion, Draw, Image, Metrics, Prompt, Score, from_json

Weights = Mapping[str, Tensor]
"""The trained weights by name: the policy's, an older policy's, or the reference's."""

_TIME_SCALE = 1000.0  # of times, as diffusers' networks take them


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

    def copy(self) -> dict[str, Tensor]:
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
        x: Tensor,
        times: Tensor,
        classes: Tensor,
        weights: Weights | None = None,
    ) -> Tensor:
        """Return [B, C, H, W] in float32, at times [B] for classes [B]; with `weights` instead of the policy's own."""
        inputs = (x.to(self.device), times.to(self.device) * _TIME_SCALE)
        named = {"class_labels": classes.to(self.device), "return_dict": False}
        outputs = torch.func.functional_call(self.network, dict(weights or {}), inputs, named)
        v: Tensor = outputs[0].float()
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


@dataclass(frozen=True)
class Trajectories:
    """Files of tensors named by their sha256: `pictures`, `points` and `logprobs` of one batch."""

    folder: Path

    def put(self, tensors: Mapping[str, Tensor]) -> str:
        """Keep tensors, on the disk on return, and return their name."""
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        name = hashlib.sha256(data).hexdigest()
        make_folder(self.folder)
        write_bytes_atomic(self.folder / name, data)
        return name

    def get(self, name: str) -> dict[str, Tensor]:
        """Return the tensors; RunFolderError where they are gone or have changed."""
        tensors: dict[str, Tensor] = load(
            read_named(self.folder / name, way_out="resume from 0")
        )
        return tensors


class _Request(NamedTuple):
    label: int
    first: int
    seed: int

    @property
    def measures(self) -> bool:
        return self.first == NOWHERE


@dataclass(eq=False)
class PictureEngine(Engine):
    """An `Engine` whose prompt is a class and the first step with noise. Simultaneous requests share a batch.

    Every batch has the same size, filled up with what is thrown away: then a picture does not depend on how many
    others were asked for with it.

    Args:
        path: of a round's pictures; `plain`: of those that measure the model.
        batch: pictures that the network takes at once.
        weights: to draw with; None for the policy's own.
    """

    name = "sampler"
    policy: FlowPolicy
    path: SamplingPath
    plain: SamplingPath
    images: ImageStore
    trajectories: Trajectories
    batch: int
    weights: Weights | None = None
    num_drawn: int = 0

    def __post_init__(self) -> None:
        self._batches = Batches[_Request](
            self._draw, kind=lambda request: request.measures, most=self.batch, wait_s=JOIN_S
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
        filled = [*requests, *[requests[0]] * (self.batch - len(requests))]
        classes = torch.tensor([request.label for request in filled])
        drawn = draw_pictures(
            self.policy,
            self.plain if measures else self.path,
            classes,
            [request.seed for request in filled],
            firsts=[request.first for request in filled],
            weights=self.weights,
        )
        size = len(requests)
        self.num_drawn += size
        kept = ""
        if not measures:
            tensors = drawn._asdict().items()
            kept = self.trajectories.put({name: values[:size] for name, values in tensors})
        completions = []
        for row, (request, values) in enumerate(zip(requests, drawn.pictures, strict=False)):
            image = self.images.put(png_of(as_pil(values)), "a drawn picture", durable=False)
            text = Picture(image, kept, row, request.first).as_text()
            completions.append(Completion((), None, text, "stop", self.version))
        return completions


@dataclass(eq=False)
class OnePicture(SingleTurnWriter):
    """A completion is one request, with the class and the place of the group's steps with noise."""

    path: SamplingPath

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        position = start.draw.position
        prompt = (*start.draw.token_ids, self.path.window(seed, position))
        return await generate(prompt, completion_seed(seed, position, index))


def draw_pictures(
    policy: FlowPolicy,
    path: SamplingPath,
    classes: Tensor,
    seeds: Sequence[int],
    *,
    firsts: Sequence[int] = (),
    weights: Weights | None,
) -> DrawnPictures:
    """Draw a picture of each class, with `weights` instead of the policy's own; noise and steps are on the CPU."""

    def velocity(x: Tensor, times: Tensor) -> Tensor:
        return policy.velocity(x, times, classes, weights).cpu()

    with torch.no_grad():
        return draw(velocity, path, seeds, policy.folder.shape, firsts=firsts)


def as_pil(values: Tensor) -> Any:
    """Return a picture [C, H, W] in [-1, 1] as PIL has it, in grey or in colours of 8 bits."""
    from PIL import Image as Pillow

    bytes_ = ((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Pillow.fromarray(
        bytes_[0].numpy() if len(bytes_) == 1 else bytes_.permute(1, 2, 0).numpy()
    )


def drop_pictures(folder: RunFolder) -> None:
    """Delete pictures and trajectories that no round of the journal and no checkpoint refers to."""
    rounds = folder.journal.glob("round-*.json")
    states = folder.checkpoints.glob("*/controller-*.json")
    references = b"".join(path.read_bytes() for path in (*rounds, *states))
    for place in (folder.images, folder.trajectories):
        for path in place.iterdir() if place.is_dir() else ():
            if os.fsencode(path.name) not in references:
                path.unlink(missing_ok=True)


# -- measuring ---------------------------------------------------------------------------------------------------------


_NUM_EACH = 8  # pictures of a class on the contact sheet, before and after
_SHEET_SCALE = 4  # pixels of the sheet for one of a picture


def conditions(prompts: Sequence[Prompt], column: str) -> list[Prompt]:
    """Return the first row of each class."""
    by_class = {prompt.columns[column]: prompt for prompt in reversed(prompts)}
    return [by_class[label] for label in sorted(by_class)]


async def measure(
    engine: PictureEngine,
    controller: Controller,
    judge: Scoring | None,
    prompts: Sequence[Prompt],
    *,
    step: int,
    config: FlowConfig,
) -> Metrics:
    """Draw and score pictures of every class, and return their figures; `judge` None measures the rewards."""
    scorings = [controller.scoring] if judge is None else [controller.scoring, judge]

    async def measure_class(prompt: Prompt) -> tuple[list[Completion], list[list[list[Score]]]]:
        label = prompt.columns[config.condition_column]
        tasks = []
        for index in range(config.num_samples):
            seed = completion_seed(config.seed, -1 - label, index)
            tasks.append(
                asyncio.create_task(engine.complete((label, NOWHERE), seed, greedy=True))
            )
        writing = PendingGroup(
            Draw(prompt.row, prompt, (label,)), tasks, step, controller.slots
        )
        scores = await together([scoring.score(writing) for scoring in scorings])
        return [await task for task in tasks], scores

    groups = await together([measure_class(prompt) for prompt in prompts])
    pictures = [Picture.of(drawn.text) for completions, _ in groups for drawn in completions]
    classes = [prompt.columns[config.condition_column] for prompt in prompts]
    return as_metrics(
        _figures(
            _values(pictures, engine.images),
            np.repeat(classes, config.num_samples),
            judged=[scores for _, by_scoring in groups for scores in by_scoring[-1]],
            learned_from=[scores for _, by_scoring in groups for scores in by_scoring[0]],
            config=config,
        )
    )


def _figures(
    values: Any,
    labels: Any,
    *,
    judged: Sequence[Sequence[Score]],
    learned_from: Sequence[Sequence[Score]],
    config: FlowConfig,
) -> Metrics:
    """Return figures of pictures with these values and classes, each with its interval over pictures.

    `diversity_of_right` is that of the pictures to which the judge gives 1 or more: a model that draws what it was not
    asked for is diverse within a class for that alone.
    """
    specs = config.eval_rewards or config.rewards
    figures = _means("reward", judged, specs)
    if config.eval_rewards:
        figures |= _means("trained_reward", learned_from, config.rewards)
    weights = [spec.weight for spec in specs]
    totals = [total_reward(scores, weights) for scores in judged]
    right = np.array([total is not None and total >= RIGHT_FROM for total in totals])
    figures["diversity"] = diversity(values, labels)
    figures["diversity_of_right"] = diversity(values[right], labels[right])
    return figures


def _values(pictures: Sequence[Picture], images: ImageStore) -> Any:
    """Return values in [-1, 1], (N, H, W, C); one channel of grey pictures, which the store opens in colours."""
    opened = [
        np.asarray(images.open(picture.image.sha256), dtype=np.float64) for picture in pictures
    ]
    values = np.array(opened) / 127.5 - 1
    is_grey = bool((values[..., :1] == values).all())
    return values[..., :1] if is_grey else values


def _means(name: str, scores: Sequence[Sequence[Score]], specs: Sequence[Any]) -> Metrics:
    """Return the mean of the weighted sum, and of each of several sources, with their intervals."""
    weights = [spec.weight for spec in specs]
    columns: dict[str, list[float | None]] = {
        name: [total_reward(row, weights) for row in scores]
    }
    if len(specs) > 1:
        for source, source_name in enumerate(reward_names(specs)):
            columns[f"{name}s/{source_name}"] = [row[source].value for row in scores]
    means: Metrics = {}
    for key, values in columns.items():
        known = np.array(without_none(values))
        means |= with_interval(key, known, np.ones(len(known)))
    return means


def diversity(values: Any, classes: Any) -> float:
    """Return the mean distance of two pictures of one class: the root of summed squares, of values in [-1, 1]."""
    means = []
    for label in np.unique(classes):
        of_class = values[classes == label]
        flat = of_class.reshape(len(of_class), -1)
        if len(flat) > 1:
            squares = (flat**2).sum(1)
            squared_distances = squares[:, None] + squares[None] - 2 * flat @ flat.T
            distances = np.sqrt(np.clip(squared_distances, 0, None))
            means.append(distances.sum() / (len(flat) * (len(flat) - 1)))
    return float(np.mean(means)) if means else 0.0


def contact_sheet(
    policy: FlowPolicy, path: SamplingPath, classes: Sequence[int], file: Path
) -> None:
    """Draw pictures of every class to a PNG, a row each: by the first model at the left, by the policy at the right.

    Both begin from the same noise.
    """
    labels = torch.tensor(classes).repeat_interleave(_NUM_EACH)
    seeds = [completion_seed(0, NOWHERE, number) for number in range(len(labels))]
    halves = []
    for weights in (policy.reference, None):
        pictures = draw_pictures(policy, path, labels, seeds, weights=weights).pictures
        framed = nn.functional.pad(pictures, (1, 1, 1, 1), value=-1.0)
        rows = framed.unflatten(0, (len(classes), _NUM_EACH))
        # Rows of pictures beneath each other: [C, rows * height, columns * width].
        halves.append(rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2))
    gap = torch.ones(*halves[0].shape[:2], 2)
    sheet = as_pil(torch.cat([halves[0], gap, halves[1]], dim=2))
    sheet.resize((sheet.width * _SHEET_SCALE, sheet.height * _SHEET_SCALE), resample=0).save(
        file
    )
