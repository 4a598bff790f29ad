"""A flow model of a few hundred weights, in the folder that diffusers saves."""

from pathlib import Path

import pytest
import torch

SHAPE, NUM_CLASSES = (1, 4, 4), 3


def save_tiny_model(folder: Path) -> Path:
    import diffusers

    torch.manual_seed(0)
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=1, attention_head_dim=8, in_channels=1, out_channels=1, num_layers=1, sample_size=4,
        patch_size=2, num_embeds_ada_norm=NUM_CLASSES, norm_num_groups=1,
    )  # fmt: skip
    with torch.no_grad():  # a fresh DiT answers 0 to everything
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    network.save_pretrained(folder / "transformer")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("flow") / "tiny")
