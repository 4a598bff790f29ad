"""What ycore adds to a vLLM worker, through vLLM's own `--worker-extension-cls`: a reload that leaves nothing old.

On CPU, vLLM multiplies with packed copies of its weights. Its reload packs anew what the checkpoint names, and an
output head that is tied to the embedding is not named there: it would go on with the first policy's weights.

Not here: who asks for it (`vllm_engine`). vLLM imports this module in the engine's own process.
"""

from typing import Any


class PolicyWorker:
    """Mixed into vLLM's worker; its methods are called by name, over `/collective_rpc`."""

    def load_policy(self: Any, weights_path: str) -> None:
        """Take the weights in a folder, tied ones included."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        self.reload_weights(weights_path=weights_path)
        if not current_platform.is_cpu():
            return
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
