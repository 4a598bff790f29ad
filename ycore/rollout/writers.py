"""Build the writer of a run's completions from its config."""

import json
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ycore.config.schema import RunConfig
from ycore.rollout.agents import AgentPool, AgentWriter
from ycore.rollout.dialogue import Dialogue
from ycore.rollout.tool_pool import ToolPool, ToolSet, describe_tools
from ycore.rollout.turns import GivenPairWriter, MultiTurnWriter, SingleTurnWriter, TurnLimits
from ycore.run.files import RunFolder
from ycore.types import Prompt


class RunDialogues:
    """The dialogues of a run: one for each environment, and one for each set of tools that an agent brings.

    ConfigError where the model's chat template cannot express one.
    """

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, run_folder: Path
    ) -> None:
        # A replay writes nothing, so that nobody needs to load what its run wrote with.
        self.tool_sets = (
            describe_tools(config, run_folder=run_folder) if not config.replay else {}
        )
        self._config = config
        self._tokenizer = tokenizer
        self._by_environment = {
            name: self._dialogue(tool_set) for name, tool_set in self.tool_sets.items()
        }
        self._by_tools: dict[str, Dialogue] = {}

    def of_prompt(self, prompt: Prompt) -> Dialogue:
        """Return the dialogue of a prompt's environment."""
        return self._by_environment[self._config.environment_of(prompt.dataset, prompt.columns)]

    def of_tools(self, tools: str) -> Dialogue:
        """Return the dialogue with an agent that has these tools, as JSON."""
        if tools not in self._by_tools:
            self._by_tools[tools] = self._dialogue(
                ToolSet(tuple(json.loads(tools))), users_answer=True
            )
        return self._by_tools[tools]

    def _dialogue(self, tool_set: ToolSet, *, users_answer: bool = False) -> Dialogue:
        return Dialogue(
            self._tokenizer,
            tool_set,
            actions=self._config.turns.actions,
            template_arguments=self._config.trl.get("chat_template_kwargs"),
            users_answer=users_answer,
        )


def build_writer(
    config: RunConfig,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    dialogues: RunDialogues,
    *,
    max_prompt_tokens: int,
) -> SingleTurnWriter:
    limits = TurnLimits(
        max_turns=config.max_turns,
        max_tokens=config.max_tokens,
        turn_tokens=config.turns.max_tokens or config.max_tokens,
        max_prompt_tokens=max_prompt_tokens,
    )
    if config.given_pairs:
        return GivenPairWriter(partial(tokenizer.encode, add_special_tokens=False))
    if config.agent is not None:
        return AgentWriter(
            dialogues.of_tools,
            AgentPool(config, folder),
            limits,
        )
    tool_sets = dialogues.tool_sets.values()
    if tool_sets:
        return MultiTurnWriter(
            dialogues.of_prompt,
            ToolPool(config, folder),
            limits,
            pays=any(tool_set.pays for tool_set in tool_sets),
            pays_turns=config.pays_turns,
            reads_state=bool(config.env) and any(":" in spec.reward for spec in config.rewards),
        )
    return SingleTurnWriter()
