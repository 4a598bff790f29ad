"""A flow model as a policy: its velocity with guidance, which of its weights learn, and those it began with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ycore.config.schema import LoraSettings
from ycore.errors import ConfigError, ModelError
from ycore.flow.flow_folder import FlowFolder

Weights = Mapping[str, torch.Tensor]
"""The trained weights by name: the policy's, an older policy's, or the reference's."""

_SCALE = 1000.0  # of times, as diffusers' networks take them


class FlowPolicy:
    """The network, always in evaluation mode: in training mode a DiT drops a tenth of its labels, and trainer and
    sampler would disagree.

    Args:
        guidance: classifier-free guidance (arXiv 2207.12598) in training and sampling alike: the velocity is
            `v_none + guidance (v - v_none)`; 1 is without.
    """

    def __init__(
        self,
        folder: FlowFolder,
        *,
        lora: LoraSettings | None,
        guidance: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        if guidance != 1 and folder.no_class is None:
            raise ConfigError(
                f"flow.guidance needs a class for none, which a {folder.network} has not; leave it out"
            )
        self.folder, self.guidance, self.device = folder, guidance, torch.device(device)
        self.network = folder.load()
        if lora is not None:
            from peft import LoraConfig, inject_adapter_in_model

            self.network.requires_grad_(False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                settings = LoraConfig(
                    r=lora.r,
                    lora_alpha=lora.alpha,
                    lora_dropout=0.0,
                    target_modules=_targets(self.network, lora),
                )
                inject_adapter_in_model(settings, self.network)
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
        """[B, C, H, W] in float32, at times [B] for classes [B]; with `weights` instead of the policy's own."""
        v = self._network_velocity(x, times, classes, weights)
        if self.guidance == 1:
            return v
        no_class = torch.full_like(classes, self.folder.no_class or 0)
        without = self._network_velocity(x, times, no_class, weights)
        return without + self.guidance * (v - without)

    def _network_velocity(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        classes: torch.Tensor,
        weights: Weights | None,
    ) -> Any:
        inputs = (x.to(self.device), times.to(self.device) * _SCALE)
        named = {"class_labels": classes.to(self.device), "return_dict": False}
        outputs = torch.func.functional_call(self.network, dict(weights or {}), inputs, named)
        return outputs[0].float()

    def save(self, root: Path) -> None:
        """A folder that `--model` takes, whole: adapters are merged in."""
        network = self.network
        if any("lora_" in name for name in self.trained):
            network = self.folder.load()
            network.load_state_dict(_merged(self.network))
        network.save_pretrained(root / self.folder.part)
        scheduler = root / "scheduler" / "scheduler_config.json"
        scheduler.parent.mkdir(parents=True, exist_ok=True)
        scheduler.write_bytes((self.folder.root / "scheduler" / scheduler.name).read_bytes())


def _targets(network: nn.Module, lora: LoraSettings) -> list[str] | str:
    """peft's `all-linear` is for transformers' models: here, the names of all linear layers of the blocks."""
    if lora.target_modules != "all-linear":
        return lora.target_modules
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linear if "block" in name and "emb" not in name] or linear


def _merged(network: nn.Module) -> dict[str, torch.Tensor]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = {
        name.replace(".base_layer", ""): value.detach().clone()
        for name, value in network.state_dict().items()
        if "lora_" not in name
    }
    for name, module in network.named_modules():
        if isinstance(module, BaseTunerLayer):
            merged[f"{name}.weight"] += module.get_delta_weight("default").detach()
    return merged
