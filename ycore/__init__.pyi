from ycore.api.functions import Run as Run
from ycore.api.functions import distill as distill
from ycore.api.functions import dpo as dpo
from ycore.api.functions import dry_run as dry_run
from ycore.api.functions import evaluate as evaluate
from ycore.api.functions import grpo as grpo
from ycore.api.functions import kto as kto
from ycore.api.functions import online_dpo as online_dpo
from ycore.api.functions import ppo as ppo
from ycore.api.functions import reward_model as reward_model
from ycore.api.functions import sft as sft
from ycore.api.own_loop import Round as Round
from ycore.api.planning import plan_run as plan_run
from ycore.api.tables import Planned as Planned

__version__: str
__all__: list[str]
