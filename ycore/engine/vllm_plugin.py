"""Patch vLLM in every process of a server (`vllm.general_plugins`), only where ycore's environment says so.

Fork the engine core: on a CPU vLLM spawns it, so that it imports again what the server has. On one core of an
AMD EPYC an engine of SmolLM2-135M starts in 17 s instead of 28 s. A fork is unsafe where torch has run on several
threads; until then the server has not. vLLM's default is a fork too, but for CPUs.

Read pictures where torchvision is missing: transformers 5.17 and vLLM 0.31 import it for processors that Pillow is enough
for. And vLLM knows a SigLIP tower's weights by names that transformers 5.17 does not write.

`WeightFiles` takes weights where the trainer is on another machine.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FORKED = "YCORE_ENGINE_FORKS"
"""The environment variable of a server whose engine core is forked."""

SIGHTED = "YCORE_ENGINE_SEES"
"""The environment variable of a server whose model reads pictures."""

SERVED = ("llava", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
"""The families of models that read pictures, by `model_type`, whose engines were compared with the trainer."""

NOT_LOADED = "vision_tower.post_layernorm."
"""The beginning of the names of weights that vLLM does not load: LLaVA takes features from before that norm."""

_OF_TOWER = ("embeddings.", "encoder.", "post_layernorm.", "head.")


def register() -> None:
    if os.environ.get(FORKED) == "1":
        core = importlib.import_module("vllm.v1.engine.utils")
        core.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    if os.environ.get(SIGHTED) == "1":
        use_pillow()
        _rename_tower()


class WeightFiles:
    """Write the files that are sent with PUT into a folder of the server's own, and answer with that folder."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._folder = Path(tempfile.gettempdir()) / "weights"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        if scope["type"] != "http" or scope["method"] != "PUT":
            await self._app(scope, receive, send)
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with (self._folder / Path(scope["path"]).name).open("wb") as file:
            async for chunk in Request(scope, receive).stream():
                file.write(chunk)
        await JSONResponse(str(self._folder))(scope, receive, send)


@cache
def use_pillow() -> None:
    """Have transformers read pictures by Pillow, and load no processors of videos, where torchvision is missing."""
    if find_spec("torchvision") is not None:
        return
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.models.smolvlm import processing_smolvlm as smolvlm
    from transformers.processing_utils import ProcessorMixin

    for family in ("pixtral", "qwen2_vl"):  # vLLM imports Pixtral's for LLaVA
        stock = f"transformers.models.{family}.image_processing_{family}"
        pillow = stock.replace("image_processing_", "image_processing_pil_")
        sys.modules[stock] = importlib.import_module(pillow)
    for name in ("Idefics3", "SmolVLM"):  # transformers hides these
        package = f"transformers.models.{name.lower()}"
        module = importlib.import_module(f"{package}.image_processing_pil_{name.lower()}")
        reader = f"{name}ImageProcessorPil"
        setattr(sys.modules[package], reader, getattr(module, reader))
    # vLLM asks it for sizes, and a chat template for frames, also where there is no video.
    ProcessorMixin.video_processor = Qwen3VLVideoProcessor()
    init = smolvlm.SmolVLMProcessor.__init__
    init.__defaults__ = (None, *init.__defaults__)
    smolvlm.num2words = str  # for videos alone
    parts = ProcessorMixin.get_attributes.__func__
    ProcessorMixin.get_attributes = classmethod(
        lambda kind: [part for part in parts(kind) if part != "video_processor"]
    )


def _rename_tower() -> None:
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    known = LlavaForConditionalGeneration.hf_to_vllm_mapper.orig_to_new_prefix
    known.update(
        {f"vision_tower.{part}": f"vision_tower.vision_model.{part}" for part in _OF_TOWER}
    )
