"""Presets: the papers' settings of the group algorithms, read from presets.yaml. The user's own values win."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ycore.advantages import ADVANTAGES
from ycore.errors import ConfigError, nearest
from ycore.run.claim import flat
from ycore.run.text import setting_in_words
from ycore.types import JsonObject, Record

if TYPE_CHECKING:
    Advantage = str
else:
    Advantage = Literal[ADVANTAGES]

Divergence = Literal["reverse-kl", "forward-kl", "js"]
"""The names for `--divergence`, and the exact ones of `distill.divergence`."""


TrustRegion = Literal["clip", "clip-completion", "dppo-tv", "dppo-kl", "icepop", "geometric"]
"""The names for `--trust-region`: `clip` is the loss's own, by token, and `clip-completion` the same by completion; the
others are keys of `ycore.trl.importance`'s `LIMITS` and `BOUNDS`."""


@dataclass(frozen=True)
class Preset:
    """An algorithm's settings."""

    name: str
    title: str
    source: str
    trl: Record  # fields of TRL's config
    # Keys of RunConfig: `advantage`, `sampling`, `loss_from`.
    run: Record = field(default_factory=dict)
    notes: Sequence[str] = ()  # differences from the paper, a line each
    # Share of `max_tokens` over which the reward `overlong` falls from 0 to -1; None is without that reward.
    overlong_share: float | None = None

    @property
    def layer(self) -> JsonObject:
        """Return it as the lowest layer of a config, under recipe, `--set` and options."""
        return {"trl": dict(self.trl), **self.run}


@cache
def presets() -> Mapping[str, Preset]:
    """Every preset by name."""
    import yaml

    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Preset(name, **row) for name, row in rows.items()}


def find_preset(name: str) -> Preset:
    """The preset of that name; ConfigError for an unknown one names the nearest."""
    known = presets()
    if name not in known:
        raise ConfigError(
            f"a preset is one of {', '.join(known)}; it is {name!r}{nearest(name, known)}"
        )
    return known[name]


def preset_lines(preset: Preset, *, trl: Record, run: Record) -> list[str]:
    """List what the preset sets, and what the user changed of it, for a plan with these TRL and run settings."""
    lines = [f"{preset.title} ({preset.source})"]
    for settings, resolved in ((preset.trl, trl), (flat(preset.run), flat(run))):
        for name, value in settings.items():
            line = f"{name} {setting_in_words(resolved[name])}"
            if resolved[name] != value:
                line += f", yours; the preset says {setting_in_words(value)}"
            lines.append(line)
    if preset.overlong_share is not None:
        lines.append(f"reward overlong, over the last {preset.overlong_share:g} of max_tokens")
    return [*lines, *(f"note: {note}" for note in preset.notes)]
