"""TRL's trainers, imported as a trainer's process does it: vLLM is installed here and stays out."""

import subprocess
import sys

import pytest

from ycore.engine.kinds import is_vllm_installed

_TRAINERS = "from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer"


@pytest.mark.skipif(not is_vllm_installed(), reason="vllm is not installed")
def test_a_trainer_comes_without_vllm() -> None:
    lines = ["import sys", "import ycore.trl.build", _TRAINERS]
    lines.append("sys.exit('vllm' in sys.modules)")
    assert (
        subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], timeout=400, check=False
        ).returncode
        == 0
    )
