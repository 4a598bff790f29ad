"""Whether the run that goes on learns from what it began with: the same rows, model and reward files.

Not here: its settings, which are compared before anything is started (`run_folder.prepare`).
"""

from pathlib import Path

from ycore.controller.assemble import Assembly
from ycore.errors import RunFolderError
from ycore.run_folder.files import read_json, write_json_atomic
from ycore.run_folder.identity import contents_that_differ, files_fingerprint, in_words, model_fingerprint
from ycore.run_folder.paths import RunFolder


def check_identity(parts: Assembly) -> None:
    """Write down what the run learns from at its first start; RunFolderError where a later start finds another."""
    check_contents(parts.home, contents(parts))


def check_contents(home: RunFolder, here: dict[str, str]) -> None:
    """The same for contents by name."""
    file = home.identity
    if not file.is_file():
        write_json_atomic(file, here)
        return
    differences = contents_that_differ(read_json(file), here)
    if differences:
        raise RunFolderError(
            f"{home.root} did not begin with this ({in_words(differences)}); bring back what it was, "
            "or go on all the same with --resume --accept-changes"
        )


def contents(parts: Assembly) -> dict[str, str]:
    """What the run learns from, by name; the policy itself is in the checkpoint."""
    told = {
        "dataset": f"{len(parts.prompts.prompts)} rows, sha256 {parts.prompts.fingerprint[:16]}",
        "model": model_fingerprint(parts.started.model),
    }
    for reward in parts.config.rewards:
        file = Path(reward.reward.rpartition(":")[0]).expanduser()
        if file.suffix == ".py" and file.is_file():
            told[f"reward {reward.reward}"] = files_fingerprint([file])
    return told
