"""`python -m ycore.rewards.check`: one process that imports one reward and says whether it can score a dataset.

Not here: the deadline, which its parent holds (`loading.check_reward`).
"""

import os

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.rewards.child import Channel, adopt_orphans, end_with_parent
from ycore.rewards.loading import check_here
from ycore.run.process_tree import kill_descendants


def main() -> None:
    """Read one question, `{"spec", "columns"}`, and answer it with `{"error": None or one line}`."""
    channel = Channel()
    end_with_parent()
    adopt_orphans()
    question = next(iter(channel))
    try:
        check_here(RewardConfig.model_validate(question["spec"]), question["columns"])
    except RewardError as error:
        channel.reply({"error": str(error)})
    else:
        channel.reply({"error": None})
    finally:
        kill_descendants(os.getpid())


if __name__ == "__main__":
    main()
