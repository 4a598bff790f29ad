"""Patch vLLM in every process of a server (`vllm.general_plugins`), only where ycore's environment says so.

Fork the engine core: on a CPU vLLM spawns it, so that it imports again what the server has. On one core of an
AMD EPYC an engine of SmolLM2-135M starts in 17 s instead of 28 s. A fork is unsafe where torch has run on several
threads; until then the server has not. vLLM's default is a fork too, but for CPUs.

Serve LLaVA: vLLM 0.31 asks transformers for a function of Pixtral's that needs
torchvision, also for LLaVA, which it does not; the same function is in the file that needs Pillow alone. And it knows a
SigLIP tower's weights by names that transformers 5.17 does not write.
"""

import importlib
import multiprocessing
import os
import sys
from importlib.util import find_spec

FORKED = "YCORE_ENGINE_FORKS"
"""The environment variable of a server whose engine core is forked."""

SIGHTED = "YCORE_ENGINE_SEES"
"""The environment variable of a server whose model reads pictures."""

SERVED = ("llava",)
"""The families of models that read pictures, by `model_type`, whose engines were compared with the trainer."""

NAMES = {"vision_tower.vision_model.": "vision_tower."}
"""The beginnings of LLaVA's weights' names that differ: vLLM's, and the checkpoint's."""

NOT_LOADED = "vision_tower.post_layernorm."
"""The beginning of the names of weights that vLLM does not load: LLaVA takes features from before that norm."""

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
