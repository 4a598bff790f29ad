"""The critic: a second tree of modules over the policy's frozen tensors, with adapters and a head of its own.

It lies inside the policy's outermost module, so that one wrapped forward and one backward serve both, and DDP sees all
parameters. It is in no state dict of the policy: neither an engine nor `model/` ever gets it. With `--full` nothing is
frozen, and the critic has every weight for itself.
"""

import copy
import functools
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ycore.errors import ConfigError, RunError
from ycore.run.claim import model_fingerprint
from ycore.run.files import read_json
from ycore.run.paths import RunFolder
from ycore.trl.base import bare

NAME = "critic"
FILE = f"{NAME}.safetensors"
VALUES = "token_values"
"""The name of the values among the outputs of a forward."""


class Critic(nn.Module):
    """The value of every position of a packed row, float32: what the policy may still expect after that token.

    Args:
        backbone: gives the hidden states.
        width: of a hidden state.
        value_range: the lowest and the highest value (arXiv 2608.23566, eq. 9); None leaves it unbounded.
    """

    def __init__(
        self, backbone: nn.Module, *, width: int, value_range: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_range = value_range
        # Without a draw from the random generator: the policy's own numbers must not depend on there being a critic.
        self.head = nn.utils.skip_init(nn.Linear, width, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, shift_labels: Any = None, fused_lm_head: Any = None, **row: Any
    ) -> dict[str, Tensor]:
        """{VALUES: (1, L)} of a packed row (1, L); labels are not used."""
        hidden = self.backbone(**row).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.head(hidden.float()).squeeze(-1)
        if self.value_range is not None:
            low, high = self.value_range
            values = low + (high - low) * (0.5 + torch.atan(values) / math.pi)
        return {VALUES: values}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Its own parameters, by name; the frozen ones are the policy's."""
        named = self.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: parameter.detach().cpu().clone().contiguous()
            for name, parameter in self.trained.items()
        }
        save_file(tensors, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take what `save` wrote; RunError where it is not there, damaged or another critic's."""
        try:
            saved = load_file(folder / FILE)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{folder} has no whole critic ({error}); go on from another with --resume-from"
            ) from error
        self.take(saved, f"the critic in {folder}")

    def take(self, saved: Mapping[str, Tensor], source: str) -> None:
        """Set every trained parameter; RunError where names or shapes differ."""
        trained = self.trained
        wrong = set(trained) ^ set(saved)
        wrong |= {
            name
            for name in set(trained) & set(saved)
            if trained[name].shape != saved[name].shape
        }
        if wrong:
            raise RunError(
                f"{source} does not fit this run's: {min(wrong)} differs; keep lora and critic as they were"
            )
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])


def add_critic(policy: Any, *, value_range: tuple[float, float] | None = None) -> Critic:
    """Make a critic of the policy as it is, and let the policy's forward give its values where `with_values` is set.

    Args:
        policy: transformers' model or peft's around it, not wrapped by accelerate.
    """
    model = bare(policy)
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    backbone = copy.deepcopy(model.base_model, frozen)  # frozen parameters stay the very same
    width = model.config.get_text_config().hidden_size
    critic = Critic(backbone, width=width, value_range=value_range)
    inner = policy.forward
    policy.add_module(NAME, critic.to(next(model.parameters()).device))

    @functools.wraps(getattr(inner, "__func__", inner))
    def forward(self: Any, *args: Any, with_values: bool = False, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        if not with_values:
            return outputs
        kwargs.pop("fused_lm_head", None)
        # A plain dict: DDP builds the output again, which a class without a field for values refuses.
        return {**outputs, **critic(**kwargs)}

    policy.forward = types.MethodType(forward, policy)
    policy.register_state_dict_post_hook(_leave_out)
    policy.register_load_state_dict_post_hook(_miss_nothing)
    return critic


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}{NAME}.")]:
        del state[name]


def _miss_nothing(module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [
        name for name in incompatible.missing_keys if not name.startswith(f"{NAME}.")
    ]


def start_from_reward_model(critic: Critic, run: Path, *, base: Path) -> None:
    """Set the critic to the reward model that a run of `ycore reward` trained.

    Args:
        run: the folder of that run.
        base: the folder of the weights that this run begins with, which must be those that it began with.

    Raises:
        ConfigError: it is no such run, or began with another model, or has other adapters.
    """
    folder = RunFolder(run)
    setting = f"critic.init {run}"
    if (
        not folder.identity.is_file()
        or read_json(folder.config)["config"].get("algorithm") != "reward"
    ):
        raise ConfigError(
            f"{setting} must be the folder of a finished run of `ycore reward`, and it is not"
        )
    began_with = read_json(folder.identity)["model"]
    base_model = model_fingerprint(base)
    if began_with != base_model:
        raise ConfigError(
            f"{setting} began with another model ({began_with} instead of {base_model}); train it on this run's --model"
        )
    has_adapter = any(".lora_" in name for name in critic.trained)
    source = folder.model / "adapter" if has_adapter else folder.model
    files = sorted(source.glob("*.safetensors"))
    if not files or has_adapter != (folder.model / "adapter").is_dir():
        kind = "adapters" if has_adapter else "every weight"
        raise ConfigError(
            f"{setting} has no trained weights in {source}, and this run trains {kind}; train both alike"
        )
    if has_adapter:
        saved_lora = read_json(source / "adapter_config.json")
        saved_r = saved_lora["r"]
        saved_alpha = saved_lora["lora_alpha"]
        r, alpha = _adapters_of(critic)
        if (saved_r, saved_alpha) != (r, alpha):
            raise ConfigError(
                f"{setting} has adapters of r {saved_r} and alpha {saved_alpha}, this run's are {r} and {alpha}; "
                f"say --set lora.r={saved_r} --set lora.alpha={saved_alpha}"
            )
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    try:
        critic.take(_renamed(saved, critic.backbone.base_model_prefix), setting)
    except RunError as error:
        raise ConfigError(str(error)) from None


def _adapters_of(critic: Critic) -> tuple[int, int]:
    """(r, alpha) of its first adapted layer."""
    modules = critic.backbone.modules()
    layer: Any = next(module for module in modules if hasattr(module, "lora_A"))
    return layer.r["default"], layer.lora_alpha["default"]


def _renamed(saved: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A classifier's tensors under the critic's names; its head is called `score` and has no bias."""
    renamed: dict[str, Tensor] = {"head.bias": torch.zeros(1)}
    for name, tensor in saved.items():
        name = name.removeprefix("base_model.model.")
        if name.startswith("score."):
            renamed["head.weight"] = tensor
            continue
        name = f"backbone.{name.removeprefix(f'{prefix}.')}"
        for part in ("lora_A", "lora_B"):
            name = name.replace(f"{part}.weight", f"{part}.default.weight")
        renamed[name] = tensor
    return renamed
