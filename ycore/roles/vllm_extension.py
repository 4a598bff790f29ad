"""What vLLM loads of ycore into each worker, by the name in `--worker-extension-cls`. To import it is to change vLLM.

vLLM imports this before it makes its model runner, which is the moment at which its sampler can still be replaced.

Not here: the parts (`vllm_worker`, `vllm_sampler`); nothing outside an engine's process imports this module.
"""

from vllm.platforms import current_platform

from ycore.roles.stacks import tell_stacks
from ycore.roles.vllm_sampler import sample_faster
from ycore.roles.vllm_worker import PolicyWorker, note_what_is_packed

__all__ = ["PolicyWorker"]

tell_stacks()
if current_platform.is_cpu():
    sample_faster()
    note_what_is_packed()
