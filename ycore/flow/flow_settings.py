"""The settings of `ycore flow`, validated."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from ycore.config.schema import (
    Count,
    Part,
    Positive,
    SamplingSettings,
    ScoredConfig,
    Share,
    Strict,
    a_fifth,
)
from ycore.errors import ConfigError

Rule = Literal["ode", "heun", "sde"]
"""How a step is made: Euler's, Heun's, or with noise (Flow-GRPO, arXiv 2505.05470, eq. 9)."""

IMAGES = "images"
"""The argument in which reward functions get pictures, one a completion, beside the dataset's columns."""


class FlowSettings(Strict):
    """How a flow model samples and what it learns by; see docs/pictures.md."""

    # `nft`: DiffusionNFT (arXiv 2509.16117), which needs no densities. `grpo`: Flow-GRPO (arXiv 2505.05470).
    method: Literal["nft", "grpo"] = "nft"
    # How a round's pictures are drawn: `ode` (Euler), `heun`, or with noise `sde`. None is `ode` for nft and `sde` for
    # grpo.
    sampler: Rule | None = None
    steps: Positive = 10  # of denoising, in a round
    eval_steps: Positive = 20  # of denoising without noise, where the model is measured
    shift: PositiveFloat | None = (
        None  # of the times towards the noise; None is the scheduler's
    )
    noise: NonNegativeFloat = 0.7  # a of `sde`
    # Of grpo: steps with noise, which are those that learn (MixGRPO, arXiv 2507.21802). None is all but the last.
    window: Positive | None = None
    # Distance to the model that the run began with, as a part of the loss: the mean of (v - v_ref)^2 with nft, the
    # exact KL of a step with grpo.
    kl: NonNegativeFloat = 0.0
    b: Part = 1.0  # of nft: how far v+ and v- lie from the old velocity
    clip: Annotated[float, Field(gt=0, lt=1)] = (
        0.2  # of grpo: bound of the ratio of densities of whole pictures
    )
    updates: Positive = 1  # of the weights by one round
    # Of nft: the sampled policy keeps min(old_rate * step, old_most) of itself at a step.
    old_rate: Share = 0.001
    old_most: Share = 0.5
    batch: Positive = 64  # pictures that the network takes at once

    @property
    def rule(self) -> Rule:
        """How a round's pictures are drawn."""
        return self.sampler or ("sde" if self.method == "grpo" else "ode")


_NOT_TAKEN = ("quantize", "accelerate", "trust_remote_code", "trl", "merge", "deterministic")
_SAMPLING_TAKEN = {"dynamic", "std_threshold", "max_tries", "max_age"}


class FlowConfig(ScoredConfig):
    """A run of `ycore flow`. Its `eval_rewards` are the held-out judge: measured, never trained on."""

    algorithm: Literal["flow"] = "flow"
    dtype: Literal["float32"] = "float32"  # densities of trajectories need it
    processes: Literal[1] = 1
    lora: None = None  # every weight is trained
    num_samples: Positive = 16  # pictures of each condition that are measured
    condition_column: str = "label"  # the column with the class that is asked for
    steps: Positive = 20
    group_size: Annotated[Count, Field(ge=2)] = 16
    learning_rate: PositiveFloat = 1e-5
    max_grad_norm: PositiveFloat = 1.0
    flow: FlowSettings = FlowSettings()

    @property
    def every(self) -> int:
        """Steps from one measurement to the next."""
        return self.eval_every or a_fifth(self.steps)

    def check(self) -> None:
        super().check()
        flow = self.flow
        for key in _NOT_TAKEN:
            if value := getattr(self, key):
                raise ConfigError(f"ycore flow has no {key}, and it is {value!r}; leave it out")
        if flow.method == "grpo" and (flow.noise == 0 or flow.rule != "sde"):
            problem = f"flow.sampler is {flow.sampler}" if flow.noise else "flow.noise is 0"
            raise ConfigError(
                f"--method grpo compares densities of steps, which only steps with noise have, and {problem}; "
                "say --set flow.sampler=sde --set flow.noise=0.7, or take --method nft"
            )
        if flow.method == "nft" and flow.window is not None:
            raise ConfigError("flow.window is of --method grpo, and this is nft; leave it out")
        if flow.window is not None and flow.window >= flow.steps:
            raise ConfigError(
                f"flow.window must be below flow.steps, {flow.steps}, whose last step has no noise; it is {flow.window}"
            )
        for key, field in SamplingSettings.model_fields.items():
            if key not in _SAMPLING_TAKEN and getattr(self.sampling, key) != field.default:
                raise ConfigError(f"ycore flow has no sampling.{key}; leave it out")
        for spec in (*self.rewards, *self.eval_rewards):
            if ":" not in spec.reward or spec.reward.startswith(
                ("rm:", "teacher:", "agrees:", "task:")
            ):
                raise ConfigError(
                    "a reward of ycore flow is a function of images, file.py:function or package.module:function, or "
                    f"judge:FILE.yaml; it is {spec.reward!r}"
                )
            if spec.constraint:
                raise ConfigError(
                    f"ycore flow has no constraints, and {spec.reward} is one; leave constraint out"
                )
