"""What a reward's process may see of its parent's environment: a short allow-list, never a token or a key.

Not here: starting the process (`worker_process`, `loading`).
"""

import os
from collections.abc import Mapping

_ALLOWED = frozenset(
    {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "SSL_CERT_FILE"}
)


def reward_environment(run_id: str, *, parent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The allowed variables of `parent`, and `YCORE_RUN`, which marks every process of a run."""
    allowed = {name: value for name, value in parent.items() if name in _ALLOWED or name.startswith("LC_")}
    return {**allowed, "YCORE_RUN": run_id}
