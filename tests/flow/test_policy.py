"""The policy: folders that it takes and refuses, and densities that its batches do not change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ycore.errors import ConfigError, ModelError
from ycore.flow.flow_inputs import FlowFolder, flow_model
from ycore.flow.flow_math import SamplingPath, draw, grpo_loss, sde_step, time_grid
from ycore.flow.picture_rounds import FlowPolicy


def velocity_inputs(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 1, 4, 4, generator=generator)
    return x, torch.rand(number, generator=generator), torch.arange(number) % 3


def test_a_policy_keeps_the_first_weights_as_its_reference(tiny_model: Path) -> None:
    policy = FlowPolicy(FlowFolder(tiny_model))
    with torch.no_grad():
        before = policy.velocity(*velocity_inputs(6))
        for weight in policy.trained.values():
            weight.add_(0.05)
        assert not torch.allclose(policy.velocity(*velocity_inputs(6)), before)
        assert torch.equal(policy.velocity(*velocity_inputs(6), policy.reference), before)


def test_a_saved_policy_is_a_whole_model_that_draws_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    policy = FlowPolicy(FlowFolder(tiny_model))
    with torch.no_grad():
        for weight in policy.trained.values():
            weight.add_(0.05)
        policy.save(tmp_path)
        again = FlowPolicy(FlowFolder(tmp_path))
        assert torch.allclose(
            again.velocity(*velocity_inputs(6)), policy.velocity(*velocity_inputs(6)), atol=1e-6
        )


def test_the_ratio_of_the_first_pass_is_one_in_other_batches_and_not_with_half_the_digits(
    tiny_model: Path,
) -> None:
    policy = FlowPolicy(FlowFolder(tiny_model))
    path = SamplingPath(time_grid(6), "sde", 0.7, length=2)
    classes, times = torch.arange(24) % 3, torch.tensor(path.times)
    with torch.no_grad():
        drawn = draw(
            lambda x, t: policy.velocity(x, t, classes), path, list(range(24)), (1, 4, 4)
        )
        for rows in (slice(0, 4), slice(4, 24)):
            x = drawn.points[rows, 0]
            now = times[:1].expand(24)[rows]
            then = times[1:2].expand(24)[rows]
            v = policy.velocity(x, now, classes[rows])
            step = sde_step(x, v, now, then, path)
            old, ones = drawn.logprobs[rows, 0], torch.ones(len(x))
            reached = drawn.points[rows, 1]
            ratio = grpo_loss(step.logprob(reached), old, ones, clip=0.2).ratio
            assert torch.allclose(ratio, ones, atol=1e-5)
            halved = step.logprob(reached.bfloat16().float())
            off = grpo_loss(halved, old, ones, clip=0.2).ratio
            assert (off - 1).abs().max() > 1e-3  # trajectories are kept in float32


def test_folders_that_are_no_flow_model_are_refused_in_one_line(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError, match=r"has no transformer/config\.json and no unet/config\.json"
    ):
        FlowFolder(tmp_path)
    with pytest.raises(ModelError, match="is no folder"):
        flow_model(str(tmp_path / "missing"))
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    scheduler, config = (
        folder / "scheduler" / "scheduler_config.json",
        folder / "transformer" / "config.json",
    )
    scheduler.write_text(json.dumps({"_class_name": "DDPMScheduler"}))
    with pytest.raises(ModelError, match="its scheduler is DDPMScheduler, not a FlowMatch one"):
        FlowFolder(folder)
    scheduler.unlink()
    with pytest.raises(ModelError, match="its scheduler is none"):
        FlowFolder(folder)
    shutil.copy(tiny_model / "scheduler" / "scheduler_config.json", scheduler)
    for change, said in (
        ({"_class_name": "SD3Transformer2DModel"}, "asks for more than a class"),
        ({"num_embeds_ada_norm": None}, "draws without a condition"),
        ({"in_channels": 16}, "so a latent"),
    ):
        config.write_text(
            json.dumps(
                json.loads((tiny_model / "transformer" / "config.json").read_text()) | change
            )
        )
        with pytest.raises(ModelError, match=said):
            FlowFolder(folder)


def test_what_is_not_installed_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ycore.flow.flow_inputs.find_spec",
        lambda name: None if name == "diffusers" else object(),
    )
    with pytest.raises(
        ConfigError,
        match=r"needs diffusers, which is not installed; pip install 'ycore\[pictures\]'",
    ):
        flow_model("tiny")


def test_a_network_of_convolutions_is_a_policy_too(tmp_path: Path) -> None:
    import diffusers

    network = diffusers.UNet2DModel(
        sample_size=4, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8,), num_class_embeds=3,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=4,
    )  # fmt: skip
    network.save_pretrained(tmp_path / "unet")
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(tmp_path / "scheduler")
    folder = FlowFolder(tmp_path)
    assert FlowPolicy(folder).velocity(*velocity_inputs(4)).shape == (4, 1, 4, 4)


def test_the_network_gets_times_as_diffusers_scales_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = FlowPolicy(FlowFolder(tiny_model))
    given: list[torch.Tensor] = []
    forward = policy.network.forward

    def seen(x: torch.Tensor, times: torch.Tensor, **named: Any) -> Any:
        given.append(times)
        return forward(x, times, **named)

    monkeypatch.setattr(policy.network, "forward", seen)
    policy.velocity(
        torch.zeros(1, *policy.folder.shape), torch.tensor([0.25]), torch.tensor([0])
    )
    assert given[0].tolist() == [250.0]
