"""TRL without vLLM, which it imports wherever it is installed, for generation that ycore leaves to engines of its own.

In a trainer that costs 3 s of processor time at the start and 190 MB for as long as it lives, on every rank.

Not here: what else is changed of TRL (`trl_seam`).
"""


def leave_out_vllm() -> None:
    """From now on TRL finds no vLLM; to be called before a trainer of TRL is imported."""
    from trl import import_utils

    import_utils.is_vllm_available = _no_vllm


def _no_vllm(min_version: str | None = None) -> bool:
    return False
