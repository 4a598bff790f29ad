"""Completions of several sequences, and rewards of turns, in TRL's loss: value and gradient, against the definition."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.config.learners import CriticSettings
from ycore.trl.grpo import TurnRewardTrainer, turn_advantages
from ycore.trl.ppo import Trainer as PPO
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score, Turn

PROMPT = (9, 8, 20, 21)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def turn(num_tokens: int, *, ours: bool = True, begins: bool = False) -> Turn:
    return Turn(
        ours, num_tokens, ({"role": "assistant", "content": ""},), starts_new_sequence=begins
    )


def completion(*turns: tuple[tuple[int, ...], str], version: int = 0) -> Completion:
    """Each turn is its tokens and who said them: `p`olicy, `e`nvironment, or the `n`ew prompt of another sequence."""
    ids = tuple(token for tokens, _ in turns for token in tokens)
    made = tuple(
        turn(len(tokens), ours=kind == "p", begins=kind == "n") for tokens, kind in turns
    )
    logprobs = tuple(
        -4.0 if part.by_policy else 0.0 for part in made for _ in range(part.num_tokens)
    )
    return Completion(ids, logprobs, "", "stop", version, made if len(made) > 1 else ())


COMPLETIONS = (
    completion(
        ((30, 31, 32), "p"),
        ((40, 41), "e"),
        ((33, 34), "p"),
        ((50, 51, 52), "n"),
        ((35, 36, 37, 38), "p"),
    ),
    completion(((30, 60), "p")),
    completion(
        ((61, 62, 63), "p"), (PROMPT, "n"), ((64,), "p"), ((50, 51, 52), "n"), ((65, 66), "p")
    ),
    completion(((67,), "p"), ((42,), "e"), ((68, 69), "p")),
)
ALONE = [
    [
        (PROMPT, (30, 31, 32, 40, 41, 33, 34), (1, 1, 1, 0, 0, 1, 1)),
        ((50, 51, 52), (35, 36, 37, 38), (1, 1, 1, 1)),
    ],
    [(PROMPT, (30, 60), (1, 1))],
    [
        (PROMPT, (61, 62, 63), (1, 1, 1)),
        (PROMPT, (64,), (1,)),
        ((50, 51, 52), (65, 66), (1, 1)),
    ],
    [(PROMPT, (67, 42, 68, 69), (1, 0, 1, 1))],
]
"""Their sequences, written down by hand: each with its prompt, its tokens, and which of them are the policy's."""

REWARDS = (1.0, 0.0, 0.25, 0.5)


class Fixed:
    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        scores = tuple((Score(reward),) for reward in REWARDS)
        return [Group(Draw(0, Prompt(0, "prompt"), PROMPT), COMPLETIONS, scores)]


def made(
    model: Path, output: Path, kind: type[SeamGRPOTrainer] = SeamGRPOTrainer, **args: Any
) -> SeamGRPOTrainer:
    trainer_args = args.pop("trainer_args", {})
    return small_trainer(
        kind,
        model,
        output,
        Fixed(),
        trainer_args=trainer_args,
        vllm_importance_sampling_correction=False,
        **args,
    )


def logprobs_alone(model: Any) -> list[list[torch.Tensor]]:
    """Return the log-probabilities of the policy's tokens of each sequence, in a forward of its own."""
    logprobs = []
    for sequences in ALONE:
        of_one = []
        for prompt, tokens, ours in sequences:
            logits = (
                model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False)
                .logits[0]
                .float()
            )
            logps = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(
                -1, torch.tensor(tokens).unsqueeze(-1)
            )
            of_one.append(logps.squeeze(-1)[torch.tensor(ours).bool()])
        logprobs.append(of_one)
    return logprobs


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_sequences_of_a_completion_share_its_advantage_and_are_one_in_the_loss(
    loss_type: str, model: Path, tmp_path: Path
) -> None:
    """`grpo`: the mean over completions of the mean over the tokens of all their sequences; `dapo`: over all tokens."""
    trainer = made(model, tmp_path, loss_type=loss_type, beta=0.0)
    batch = trainer._generate_and_score_completions([{"prompt": "tick"}] * 4)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    seen = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.model.zero_grad()
    rewards = torch.tensor(REWARDS)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    logps = [torch.cat(of_one) for of_one in logprobs_alone(trainer.model)]
    sums = [
        -advantage * (logp - logp.detach()).exp()
        for advantage, logp in zip(advantages, logps, strict=True)
    ]
    expected = (
        torch.stack([term.mean() for term in sums]).mean()
        if loss_type == "grpo"
        else torch.cat(sums).mean()
    )
    assert [len(logp) for logp in logps] == [9, 2, 6, 3]
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, atol=1e-6, rtol=1e-5, msg=name)
    assert max(float(gradient.abs().max()) for gradient in seen.values()) > 1e-3


def test_no_sequence_reads_another(model: Path, tmp_path: Path) -> None:
    """The log-probabilities themselves, in the loss and where TRL scores a whole round; and the control without it."""
    trainer = made(
        model, tmp_path, beta=0.1, num_iterations=2
    )  # the reference and the old ones are scored by the round
    batch = trainer._generate_and_score_completions([{"prompt": "tick"}] * 4)
    with torch.no_grad():
        expected = [torch.cat(of_one) for of_one in logprobs_alone(trainer.model)]
    mask = batch["completion_mask"] * batch["tool_mask"]
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        for row, ours, known in zip(batch[name], mask.bool(), expected, strict=True):
            torch.testing.assert_close(row[ours], known, atol=1e-5, rtol=0)
    del batch["later_prompt_lengths"]
    trainer._micro_batch = batch
    ids, attended = (
        torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], dim=1)
        for of in ("ids", "mask")
    )
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attended, mask.size(1)
        )[0]
    assert float((logps[0][mask[0].bool()] - expected[0]).abs().max()) > 1e-2, (
        "one sequence would be another"
    )


NAN = float("nan")


def test_a_turns_advantage_is_among_the_groups_turns_of_its_number() -> None:
    """Two groups of three, worked out by hand; a deviation of the sample, with 1e-4 added."""
    rewards = [[1.0, 2.0], [2.0], [3.0, 4.0, 5.0], [0.5, NAN], [0.5, 1.0], [NAN, 3.0]]
    spread = 2**0.5  # of 2 and 4, and of 1 and 3
    expected = [
        [-1 / 1.0001, -1 / (spread + 1e-4), 0],
        [0, 0, 0],
        [1 / 1.0001, 1 / (spread + 1e-4), 0],
        [0, 0, 0],
        [0, -1 / (spread + 1e-4), 0],
        [0, 1 / (spread + 1e-4), 0],
    ]
    torch.testing.assert_close(
        torch.tensor(turn_advantages(rewards, group_size=3)), torch.tensor(expected)
    )
    assert turn_advantages([[], []], group_size=2) == [[0.0], [0.0]]


def paid(
    completions: tuple[Completion, ...], rewards: list[list[float | None]]
) -> tuple[Completion, ...]:
    """Return the completions, with rewards of the policy's turns."""
    rewarded = []
    for played, turn_rewards in zip(completions, rewards, strict=True):
        left = list(turn_rewards)
        rewarded.append(
            replace(
                played,
                turns=tuple(
                    replace(t, reward=left.pop(0)) if t.by_policy else t for t in played.turns
                ),
            )
        )
    return tuple(rewarded)


class Paid(Fixed):
    def __init__(self, rewards: list[list[float | None]]) -> None:
        self.completions = paid(COMPLETIONS, rewards)

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        return [
            replace(group, completions=self.completions)
            for group in super().next_round(step=0, num_groups=1)
        ]


def test_rewards_of_turns_are_beside_the_outcomes_advantage_at_their_own_tokens(
    model: Path, tmp_path: Path
) -> None:
    trainer = made(model, tmp_path, TurnRewardTrainer, loss_type="dapo", beta=0.0)
    trainer.rounds = Paid([[1.0, 2.0, 9.0], [], [0.0, None, 9.0], [0.5, 9.0]])
    batch = trainer._generate_and_score_completions([{"prompt": "tick"}] * 4)
    outcome = torch.tensor(REWARDS)
    outcome = (outcome - outcome.mean()) / (outcome.std() + 1e-4)
    first = torch.tensor([1.0, 0.0, 0.5])
    first = (first - first.mean()) / (
        first.std() + 1e-4
    )  # of three: the second completion has one turn, its last
    of_turns = [
        [first[0]] * 3 + [0.0] * 6,
        [0.0] * 2,
        [first[1]] * 3 + [0.0] * 3,
        [first[2]] + [0.0] * 2,
    ]
    expected = [outcome[row] + torch.tensor(of_turns[row]) for row in range(4)]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    for row, ours, known in zip(batch["advantages"], mask, expected, strict=True):
        torch.testing.assert_close(row[ours], known, atol=1e-6, rtol=0)
    assert not batch["advantages"][~mask].any()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    seen = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.model.zero_grad()
    logps = [torch.cat(of_one) for of_one in logprobs_alone(trainer.model)]
    terms = [
        -advantage * (logp - logp.detach()).exp()
        for advantage, logp in zip(expected, logps, strict=True)
    ]
    torch.cat(terms).mean().backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_rewards_at_the_last_turn_alone_are_the_groups_advantage(
    model: Path, tmp_path: Path
) -> None:
    trainer = made(model, tmp_path, TurnRewardTrainer, beta=0.0)
    trainer.rounds = Paid([[None, None, 1.0], [], [None, None, 0.25], [None, 0.5]])
    batch = trainer._generate_and_score_completions([{"prompt": "tick"}] * 4)
    plain = made(model, tmp_path / "plain", beta=0.0)._generate_and_score_completions(
        [{"prompt": "tick"}] * 4
    )
    mask = batch["completion_mask"] * batch["tool_mask"]
    torch.testing.assert_close(batch["advantages"], plain["advantages"].unsqueeze(1) * mask)


def test_a_critic_reads_each_sequence_alone(model: Path, tmp_path: Path) -> None:
    trainer = made(
        model,
        tmp_path,
        PPO,
        trainer_args={"critic": CriticSettings(whiten=False), "base": model},
        loss_type="dapo",
        beta=0.0,
    )
    assert isinstance(trainer, PPO)
    torch.nn.init.normal_(trainer.critic.head.weight)
    batch = trainer._generate_and_score_completions([{"prompt": "tick"}] * 4)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    for row, ours, sequences in zip(batch["old_values"], mask, ALONE, strict=True):
        alone = []
        for prompt, tokens, by_policy in sequences:
            with torch.no_grad():
                states = trainer.critic.backbone(
                    torch.tensor([[*prompt, *tokens]])
                ).last_hidden_state[0]
                values = trainer.critic.head(states).squeeze(-1)[len(prompt) - 1 : -1]
            alone.append(values[torch.tensor(by_policy).bool()])
        torch.testing.assert_close(row[ours], torch.cat(alone), atol=1e-5, rtol=0)
    assert float(batch["old_values"][mask].std()) > 0.1
