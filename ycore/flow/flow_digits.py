"""`python -m ycore.flow.flow_digits FOLDER`: make `flow-digits`, a small model that draws handwritten digits.

It learns from scikit-learn's 1,797 real digits of 8 x 8 pixels. Two of five of its labels are drawn anew at random, on
purpose: so it draws well, but does not draw what it is asked for, and there is something to learn from a reward.
"""

import sys
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ycore.flow.flow_inputs import DIGITS_CLASSES
from ycore.flow.flow_math import noised

NOISY_LABELS = 0.4
_STEPS, _BATCH, _RATE, _AVERAGE = 800, 128, 2e-3, 0.99


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pictures in [-1, 1], [1797, 1, 8, 8], and their labels."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    pictures = torch.tensor(dataset.images, dtype=torch.float32)[:, None] / 8 - 1
    return pictures, torch.tensor(dataset.target)


def make(folder: Path, *, steps: int = _STEPS, seed: int = 0) -> None:
    """Train the model and write its folder, by flow matching: the mean of `(v - (eps - x0))^2` at even times."""
    import diffusers

    torch.manual_seed(seed)
    pictures, labels = digits()
    chance = torch.rand(len(labels)) < NOISY_LABELS
    labels = torch.where(chance, torch.randint(DIGITS_CLASSES, labels.shape), labels)
    network = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(24, 48),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=8, num_class_embeds=DIGITS_CLASSES,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, steps, pct_start=0.1)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(_AVERAGE))
    average.update_parameters(network)
    for number in range(steps):
        rows = torch.randint(len(pictures), (_BATCH,))
        x0, times = pictures[rows], torch.rand(_BATCH)
        noise = torch.randn_like(x0)
        v = network(
            noised(x0, noise, times), times * 1000, class_labels=labels[rows], return_dict=False
        )[0]
        loss = ((v - (noise - x0)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(network)
        if number % 100 == 0:
            print(f"step {number} of {steps}: loss {loss.item():.4f}", flush=True)
    average.module.save_pretrained(folder / "unet")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
