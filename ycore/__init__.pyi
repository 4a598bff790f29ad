from ycore_cli.from_python import Comparison as Comparison
from ycore_cli.from_python import Run as Run
from ycore_cli.from_python import distill as distill
from ycore_cli.from_python import dpo as dpo
from ycore_cli.from_python import evaluate as evaluate
from ycore_cli.from_python import grpo as grpo
from ycore_cli.from_python import kto as kto
from ycore_cli.from_python import online_dpo as online_dpo
from ycore_cli.from_python import ppo as ppo
from ycore_cli.from_python import reward_model as reward_model
from ycore_cli.from_python import rloo as rloo
from ycore_cli.from_python import sft as sft
from ycore_cli.own_loop import Round as Round
from ycore_cli.plan import Planned as Planned
from ycore_cli.plan import dry_run as dry_run
from ycore_cli.plan import plan_run as plan_run

__version__: str
__all__: list[str]
