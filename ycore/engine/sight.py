"""Turn a prompt with pictures into token ids and pixels, the same for engine and trainer.

A picture is one token in what a chat template writes, and as many as it has features in what the model reads.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ycore.engine.vllm_plugin import use_pillow
from ycore.errors import ModelError
from ycore.run.files import ImageStore
from ycore.types import Prompt, Record, in_blocks


def image_token_ids(config: Record) -> list[int]:
    """Return the tokens that stand for pictures or frames, by a model's config; none of them may be sampled."""
    keys = [f"{kind}_token_{name}" for kind in ("image", "video") for name in ("id", "index")]
    return sorted({config[key] for key in keys if isinstance(config.get(key), int)})


class Sight:
    """Example: `sight = load_sight(model, store, tokenizer)`, and then `sight.prompt_ids(prompt)`.

    Args:
        processor: The model's processor of transformers.
        store: The pictures of the run.
        template_arguments: Further arguments of the chat template.
    """

    def __init__(
        self,
        processor: Any,
        store: ImageStore,
        template_arguments: Record | None = None,
    ) -> None:
        self.processor = processor
        self.store = store
        self._template_arguments = dict(template_arguments or {})
        self._ids = lru_cache(maxsize=4096)(self._encoded)

    def text(self, prompt: Prompt) -> str:
        """Write a prompt with its chat template, with a token for each picture."""
        arguments = {**self._template_arguments, **prompt.template_arguments}
        return str(
            self.processor.apply_chat_template(
                in_blocks(prompt.content),
                tools=list(prompt.tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **arguments,
            )
        )

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids that the model reads."""
        return self._ids(self.text(prompt), prompt.images)

    def short_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids with one token a picture; vLLM expands it."""
        return tuple(
            self.processor.tokenizer(self.text(prompt), add_special_tokens=False)["input_ids"]
        )

    def inputs(self, prompts: Sequence[Prompt]) -> Any:
        """Return the inputs of transformers' model: (B, P) token ids padded left, and the pixels of all pictures."""
        return self._processed(
            [self.text(prompt) for prompt in prompts],
            [prompt.images for prompt in prompts],
        )

    def _encoded(self, text: str, images: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(self._processed([text], [images])["input_ids"][0].tolist())

    def _processed(self, texts: list[str], images: Sequence[Sequence[Any]]) -> Any:
        opened = [[self.store.open(image.sha256) for image in row] for row in images]
        return self.processor(
            text=texts,
            images=opened if any(opened) else None,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )


def load_sight(
    model: Path,
    store: ImageStore,
    tokenizer: Any,
    *,
    trust_remote_code: bool = False,
    template_arguments: Record | None = None,
) -> Sight:
    """Load the processor of a vision-language model, with this tokenizer; ModelError where it has none."""
    from transformers import AutoProcessor, ProcessorMixin

    use_pillow()
    try:
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise ModelError(
            f"the pictures need the model's processor, which cannot be loaded: {reason}"
        ) from None
    if not isinstance(processor, ProcessorMixin) or not image_token_ids(
        json.loads((model / "config.json").read_text())
    ):
        raise ModelError(
            f"the prompts have pictures, and {model} reads text only; take a vision-language model"
        )
    processor.tokenizer = tokenizer
    if getattr(processor, "chat_template", None) is None:
        processor.chat_template = tokenizer.chat_template
    return Sight(processor, store, template_arguments)
