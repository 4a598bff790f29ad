"""An algorithm is a TRL trainer with ycore's mixin, and the few places where the two differ.

TRL imports vLLM wherever it is installed. ycore's engines run in processes of their own, so the import costs a trainer
half a minute and memory for nothing: whoever imports a file of this room gets a TRL that finds no vLLM.
"""

import os

from trl import import_utils

import_utils.is_vllm_available = lambda min_version=None: False
os.environ.setdefault(
    "TRL_EXPERIMENTAL_SILENCE", "1"
)  # `rollout_func` and GMPO are experimental, and used knowingly
