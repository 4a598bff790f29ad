"""accelerate's FSDP2 on cores: without this it shards nothing there. A test tool.

accelerate takes FSDP for devices only (`AcceleratorState`), though its FSDP2 is torch's `fully_shard`, which works on
cores too. `allow` makes it take FSDP wherever it was asked for; the rest is accelerate's own way to prepare a model.
"""

import os
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def allow() -> None:
    """Let accelerate shard on cores from now on, where a configuration file asks for FSDP."""
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    initialize = AcceleratorState.__init__

    def with_fsdp(
        state: AcceleratorState, *arguments: Any, fsdp_plugin: Any = None, **settings: Any
    ) -> None:
        initialize(state, *arguments, fsdp_plugin=fsdp_plugin, **settings)
        shared = AcceleratorState._shared_state
        if fsdp_plugin is not None and shared.get("fsdp_plugin") is None:
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin = fsdp_plugin
        if shared.get("fsdp_plugin") is not None:
            state.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp  # type: ignore[method-assign]
