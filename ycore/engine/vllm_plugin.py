"""What vLLM loads into every process of a server (`vllm.general_plugins`); it acts only where ycore's environment says.

An engine core that is forked: on a CPU vLLM spawns it, so that it imports again what the server has. On one core of an
AMD EPYC an engine of SmolLM2-135M starts in 17 s instead of 28 s. A fork is unsafe where torch has run on several
threads; until then the server has not. vLLM's default is a fork too, but for CPUs.

A server whose model sees, which serves LLaVA: vLLM 0.31 asks transformers for a function of Pixtral's that needs
torchvision, also for LLaVA, which it does not; the same function is in the file that needs Pillow alone. And it knows a
SigLIP tower's weights by names that transformers 5.17 does not write.
"""

import importlib
import multiprocessing
import os
import sys
from importlib.util import find_spec

FORKED = "YCORE_ENGINE_FORKS"
"""In the environment of a server whose engine core is forked."""

SIGHTED = "YCORE_ENGINE_SEES"
"""In the environment of a server whose model sees."""

SERVED = ("llava",)
"""The families, by `model_type`, whose engines were held to the trainer."""

NAMES = {
    "vision_tower.vision_model.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "language_model.model.": "model.language_model.",
}
"""From how vLLM's names of LLaVA's weights begin to how the trainer's do."""

NOT_HELD = "model.vision_tower.post_layernorm."
"""How the trainer's names of weights begin that vLLM leaves out: LLaVA takes what comes before that norm."""

_PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"
_OF_TOWER = ("embeddings.", "encoder.", "post_layernorm.", "head.")


def register() -> None:
    if os.environ.get(FORKED) == "1":
        _fork_the_core()
    if os.environ.get(SIGHTED) == "1":
        _serve_llava()


def _fork_the_core() -> None:
    core = importlib.import_module("vllm.v1.engine.utils")
    core.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]


def _serve_llava() -> None:
    if find_spec("torchvision") is None:
        sys.modules[_PIXTRAL] = importlib.import_module(
            "transformers.models.pixtral.image_processing_pil_pixtral"
        )
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    known = LlavaForConditionalGeneration.hf_to_vllm_mapper.orig_to_new_prefix
    known.update(
        {f"vision_tower.{part}": f"vision_tower.vision_model.{part}" for part in _OF_TOWER}
    )
