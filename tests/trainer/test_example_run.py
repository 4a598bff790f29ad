"""Every trainer without rollouts, for real on the tiny model: it learns, its model loads, it goes on exactly."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from tests.tiny_model import write_tiny_model
from tests.tiny_vision import write_tiny_vision_model
from ycore.config.algorithms import find_algorithm
from ycore.config.resolve import resolve
from ycore.errors import DataError, Interrupted, RunFolderError
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.run.claim import claim
from ycore.run.files import RunFolder, read_json, write_json_atomic
from ycore.run.metrics import is_evaluation, read_metrics
from ycore.trainer.example_run import ExampleRun
from ycore.trl.build import _rows, build_trainer

PAIRS = [
    {
        "chosen": f"\n\nHuman: {a} + {b}?\n\nAssistant: it is {a + b}",
        "rejected": f"\n\nHuman: {a} + {b}?\n\nAssistant: NO",
    }
    for a in range(8)
    for b in range(4)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "tiny")
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return root


def opened(place: Path, output: Path, method: str, **keys: Any) -> ExampleRun:
    """Write what the launcher leaves for the trainer's process, and return the run that finds it."""
    options = {
        "algorithm": method,
        "model": str(place / "tiny"),
        "dataset": str(place / "pairs.jsonl"),
        "output": str(output),
        "dtype": "float32",
        "steps": 8,
        "batch_size": 4,
        "held_out": 6,
        "eval_every": 2,
        "checkpoint_every": 4,
        **keys,
    }
    options["trl"] = {"learning_rate": 1e-2, **keys.get("trl", {})}
    config = resolve(options=options)
    folder = RunFolder(output)
    claim(folder, config, resume=folder.config.exists()).release()
    write_json_atomic(output / "engines.json", {"model": options["model"], "home": str(output)})
    return ExampleRun(output)


def trained(run: ExampleRun) -> None:
    try:
        run.train()
        run.save()
    finally:
        run.close()


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(RunFolder(output).metrics) if "loss" in row]


def measured(output: Path) -> dict[int, dict[str, float]]:
    """Return the figures of each evaluation, by its step, without its seconds."""
    rows = [row for row in read_metrics(RunFolder(output).metrics) if is_evaluation(row)]
    assert not any("loss" in row for row in rows), "an evaluation has a row of its own"
    return {
        row["step"]: {name: row[name] for name in row if name.startswith("ycore/eval/")}
        for row in rows
    }


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "adapter_model.safetensors"))


def same(weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == other_weights.keys() and all(
        torch.equal(weights[name], other_weights[name]) for name in weights
    )


@pytest.mark.parametrize(
    ("method", "keys", "better"),
    [
        ("sft", {"columns": {"text": "chosen"}}, "mean_token_accuracy"),
        (
            "sft",
            {
                "columns": {"text": "chosen"},
                "lora": None,
                "trl": {"packing": True, "max_length": 64},
            },
            "loss",
        ),
        ("reward", {}, "loss"),
        ("reward", {"lora": None, "trl": {"learning_rate": 1e-3}}, "loss"),
        ("dpo", {}, "rewards/accuracies"),
        ("kto", {}, "rewards/margins"),
    ],
    ids=["sft", "sft-packed-full", "reward", "reward-full", "dpo", "kto"],
)
def test_it_learns_and_its_model_loads(
    method: str, keys: dict[str, Any], better: str, place: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    trained(opened(place, output, method, **keys))
    seen = losses(output)
    assert len(seen) == 8 and sum(seen[-3:]) < sum(seen[:3])
    held_out = read_json(RunFolder(output).held_out)
    before, after = held_out["held_out"]["before"], held_out["held_out"]["after"]
    assert after["n"] == before["n"] > 0
    assert (
        after["loss"] < before["loss"] if better == "loss" else after[better] > before[better]
    )
    assert held_out["rows_too_long"] == 0
    assert list(measured(output)) == [0, 2, 4, 6, 8] and set(
        find_algorithm(method).figures
    ) <= set(after)
    assert measured(output)[8]["ycore/eval/loss"] == after["loss"] and after["step"] == 8
    if method == "reward":
        assert (
            after["accuracy"] == 1.0 == after["accuracy/high"]
            and 0.5 < after["accuracy/low"] < 1.0
        )
    assert loads(output, method, place)
    assert [path.name for path in sorted(RunFolder(output).checkpoints.glob("checkpoint-*"))] == [
        "checkpoint-4", "checkpoint-8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("soft_label", "margin"),
    [
        (0.7, 0.847),
        *(
            pytest.param(label, margin, marks=pytest.mark.verify)
            for label, margin in ((0.3, 0.847), (0.5, 0.0))
        ),
    ],
)
def test_a_reward_model_learns_the_chance_of_a_soft_label(
    soft_label: float, margin: float, place: Path, tmp_path: Path
) -> None:
    """The cross-entropy is least at the margin log(p / (1 - p)), with the likelier answer as the chosen one."""
    rows = tmp_path / "soft.jsonl"
    rows.write_text((json.dumps(PAIRS[9] | {"soft_label": soft_label}) + "\n") * 8)
    keys = {
        "dataset": str(rows),
        "eval_dataset": str(rows),
        "held_out": 4,
        "steps": 30,
        "eval_every": 30,
    }
    run = opened(place, tmp_path / "run", "reward", **keys)
    batch = next(iter(run.trainer.get_train_dataloader()))
    assert batch["soft_label"].tolist() == pytest.approx([max(soft_label, 1 - soft_label)] * 2)
    trained(run)
    after = read_json(RunFolder(tmp_path / "run").held_out)["held_out"]["after"]
    assert after["margin"] == pytest.approx(margin, abs=0.25)
    least = -sum(p * math.log(p) for p in (soft_label, 1 - soft_label))
    assert after["loss"] == pytest.approx(least, abs=0.02)
    assert losses(tmp_path / "run")[-1] == pytest.approx(least, abs=0.02)


@pytest.mark.parametrize("soft", ["train", "held out"])
def test_soft_labels_may_be_of_one_side_alone(soft: str, place: Path, tmp_path: Path) -> None:
    """Held-out pairs without them count as certain."""
    (tmp_path / "soft.jsonl").write_text(json.dumps(PAIRS[9] | {"soft_label": 0.9}) + "\n")
    (tmp_path / "hard.jsonl").write_text(json.dumps(PAIRS[8]) + "\n")
    names = ["soft.jsonl", "hard.jsonl"] if soft == "train" else ["hard.jsonl", "soft.jsonl"]
    rows, held_out = (str(tmp_path / name) for name in names)
    keys = {"dataset": rows, "eval_dataset": held_out, "held_out": 1, "batch_size": 1}
    trained(opened(place, tmp_path / "run", "reward", **keys, steps=1))
    after = read_json(RunFolder(tmp_path / "run").held_out)["held_out"]["after"]
    assert after["n"] == 1
    assert after["loss"] == pytest.approx(math.log1p(math.exp(-after["margin"])), abs=1e-4)


def loads(output: Path, method: str, place: Path) -> bool:
    """Whether the saved model is another than the first one, and answers with numbers."""
    folder = RunFolder(output).model
    if method == "reward":
        return ranks_right(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(place / "tiny")
    ids = AutoTokenizer.from_pretrained(folder)("1 + 1?", return_tensors="pt")["input_ids"]
    logits, base_logits = model(ids).logits, base(ids).logits
    return bool(torch.isfinite(logits).all()) and not torch.equal(logits, base_logits)


def ranks_right(folder: Path) -> bool:
    """Whether the model, alone and in a padded batch, prefers what was chosen, as transformers loads it."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    talks = [
        [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": text}]
        for text in ("it is 7", "NO")
    ]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
    with torch.no_grad():
        alone = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
        batch = (
            model(**tokenizer(texts, return_tensors="pt", padding=True))
            .logits.squeeze(-1)
            .tolist()
        )
    assert batch == pytest.approx(alone, abs=1e-4)
    return alone[0] > alone[1]


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["whole", "adapter"])
@pytest.mark.parametrize(
    "method", ["sft", "dpo", pytest.param("kto", marks=pytest.mark.verify)]
)
def test_the_compact_head_changes_no_figure_of_trls(
    method: str,
    lora: dict[str, int] | None,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps losses, gradients, entropies, accuracies and mean logits, in training and on held-out rows."""
    keys: dict[str, Any] = {
        "lora": lora,
        "steps": 3,
        "columns": {"text": "chosen"} if method == "sft" else {},
    }
    names, heads = build_trainer.__globals__, list[Any]()
    add = names["add_compact_head"]
    monkeypatch.setitem(
        names,
        "add_compact_head",
        lambda model, **options: (heads.append(model), add(model, **options)),
    )
    for side, is_ours in (("ours", True), ("trl", False)):
        monkeypatch.setitem(
            names, "needs_compact_head", lambda trainer, is_ours=is_ours: is_ours
        )
        trained(opened(place, tmp_path / side, method, **keys))
    assert len(heads) == (
        1 if method == "sft" or lora else 2
    )  # a reference beside whole weights
    for ours, theirs in zip(
        *(figures(tmp_path / side) for side in ("ours", "trl")), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def figures(output: Path) -> list[dict[str, float]]:
    """Return the figures of every step and both measurements that do not depend on the machine's speed."""
    ends = read_json(RunFolder(output).held_out)["held_out"]
    rows = [*read_metrics(RunFolder(output).metrics), ends["before"], ends["after"]]
    return [
        {name: value for name, value in row.items() if not name.startswith("ycore/time")}
        for row in rows
    ]


def test_an_adapter_of_one_stage_is_the_model_of_the_next(place: Path, tmp_path: Path) -> None:
    trained(
        opened(place, tmp_path / "one", "sft", columns={"text": "chosen"}, steps=2, merge=True)
    )
    model = RunFolder(tmp_path / "one").model
    assert (model / "merged" / "config.json").is_file()
    assert resolve_model(str(model)).kind == "adapter"
    assert (
        AutoModelForCausalLM.from_pretrained(
            fetch_model(resolve_model(str(model)))
        ).config.vocab_size
        > 0
    )


def test_stopped_and_gone_on_with_is_never_stopped(place: Path, tmp_path: Path) -> None:
    """Dropout draws random numbers: without the generators restored the losses part at once.

    With KTO; `test_killed_tuning` does it with SFT and a real kill.
    """
    keys: dict[str, Any] = {
        "lora": {"dropout": 0.2},
        "trl": {"disable_dropout": False},
        "steps": 6,
        "checkpoint_every": 2,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(opened(place, whole, "kto", **keys))

    run = opened(place, parts, "kto", **keys)
    run.trainer.add_callback(StopAfter(run, step=3))
    with pytest.raises(Interrupted, match="stopped after step 3"):
        run.train()
    run.close()  # as a kill would: what was after the checkpoint of step 2 is lost
    trained(opened(place, parts, "kto", **keys))

    assert losses(parts) == losses(whole) and len(set(losses(whole))) == 6
    assert measured(parts) == measured(whole)
    assert same(adapter(RunFolder(whole).model), adapter(RunFolder(parts).model))


@pytest.mark.verify
@pytest.mark.parametrize(
    "method",
    [
        "dpo",
        "sft",
        "reward",
    ],
)
def test_a_stop_ends_a_measurement_and_the_run_goes_on(
    method: str, place: Path, tmp_path: Path
) -> None:
    """Before the first step nothing is left behind; later all steps are kept and only the figures are missing."""
    rows = {"columns": {"text": "chosen"}} if method == "sft" else {}
    trained(opened(place, tmp_path / "whole", method, **rows))
    first = opened(place, tmp_path / "run", method, **rows)
    first.stop.set()
    with pytest.raises(Interrupted, match="held-out rows"):
        first.train()
    assert first.trainer.state.global_step == 0
    first.save_checkpoint()
    first.close()

    for step in (6, 8):
        run = opened(place, tmp_path / "run", method, **rows)
        stop_while_measuring(run, step)
        with pytest.raises(Interrupted):
            run.train()
        run.save_checkpoint()
        run.close()
        assert list(measured(tmp_path / "run")) == [0, 2, 4, 6][: step // 2]
        assert read_json(
            RunFolder(tmp_path / "run").checkpoints
            / f"checkpoint-{step}"
            / "trainer_state.json"
        )
    assert not RunFolder(tmp_path / "run").held_out.is_file()

    trained(opened(place, tmp_path / "run", method, **rows))
    assert read_json(RunFolder(tmp_path / "run").held_out)["held_out"]["after"]["n"] == 6
    assert measured(tmp_path / "run") == measured(tmp_path / "whole")
    steps = [
        [numbers(row) for row in read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("run", "whole")
    ]
    assert [row for row in steps[0] if "loss" in row] == [
        row for row in steps[1] if "loss" in row
    ]


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Drop times, and TRL's count of tokens, which begins anew in each process."""
    return {name: row[name] for name in row if "time" not in name and name != "num_tokens"}


def stop_while_measuring(run: ExampleRun, step: int) -> None:
    measure = run.trainer.measure

    def stops() -> Any:
        if run.trainer.state.global_step == step:
            run.stop.set()
        return measure()

    run.trainer.measure = stops


def scripted(run: ExampleRun, losses_by_step: dict[int, float]) -> ExampleRun:
    """The losses that it measures are the test's own; at a step without any it is stopped."""

    def measure() -> dict[str, Any]:
        if run.trainer.state.global_step not in losses_by_step:
            raise Interrupted("stopped while the held-out rows were measured")
        return {"n": 6, "loss": losses_by_step[run.trainer.state.global_step]}

    run.trainer.measure = measure
    return run


def test_evaluations_change_nothing_of_the_training_and_the_best_model_is_kept(
    place: Path, tmp_path: Path
) -> None:
    """The least loss is that of step 2. Dropout draws random numbers, and evaluations must draw none of them."""
    keys: dict[str, Any] = {"lora": {"dropout": 0.2}, "columns": {"text": "chosen"}, "steps": 6}
    trained(opened(place, tmp_path / "plain", "sft", **keys, eval_every=None))
    losses_by_step = {0: 3.0, 2: 1.0, 4: 2.0, 6: 1.5}
    run = scripted(
        opened(place, tmp_path / "best", "sft", **keys, keep_best="loss"), losses_by_step
    )
    weights = Keeps(run)
    run.trainer.add_callback(weights)
    trained(run)
    assert list(measured(tmp_path / "plain")) == [0, 6] and list(
        measured(tmp_path / "best")
    ) == [
        0,
        2,
        4,
        6,
    ]
    assert losses(tmp_path / "plain") == losses(tmp_path / "best")
    plain, best = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "best")
    assert same(adapter(plain.model), adapter(best.model)) and not same(
        adapter(best.best), adapter(best.model)
    )
    kept = list(adapter(best.best).values())
    assert len(kept) == len(weights.steps[2])
    assert all(any(torch.equal(weight, other) for other in kept) for weight in weights.steps[2])
    assert (
        read_json(best.best / "evaluation.json")["step"]
        == 2
        == read_json(best.held_out)["best"]["step"]
    )


class Keeps(TrainerCallback):
    """The trained weights after every step."""

    def __init__(self, run: ExampleRun) -> None:
        self._run, self.steps = run, dict[int, list[torch.Tensor]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        weights = self._run.trainer.bare_model.parameters()
        self.steps[state.global_step] = [
            weight.detach().clone() for weight in weights if weight.requires_grad
        ]


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.verify), "bfloat16"]
)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_reward_model_that_is_kept_trains_on_as_it_was(
    dtype: str, lora: bool, place: Path, tmp_path: Path
) -> None:
    """It is saved merged, or in the dtype of its result, and the model in training must stay what it is."""
    keys: dict[str, Any] = {"steps": 4, "dtype": dtype, **({} if lora else {"lora": None})}
    trained(opened(place, tmp_path / "plain", "reward", **keys, eval_every=2))
    trained(
        opened(place, tmp_path / "best", "reward", **keys, eval_every=2, keep_best="accuracy")
    )
    assert losses(tmp_path / "plain") == losses(tmp_path / "best")
    assert measured(tmp_path / "plain") == measured(tmp_path / "best")
    best = RunFolder(tmp_path / "best").best
    assert AutoModelForSequenceClassification.from_pretrained(best).config.num_labels == 1
    assert (best / "adapter").is_dir() == lora and read_json(best / "evaluation.json")[
        "ycore/eval/n"
    ] == 6


@pytest.mark.verify
def test_a_run_without_gain_ends_early_also_where_it_was_stopped_before(
    place: Path, tmp_path: Path
) -> None:
    """The loss of step 2 is the least. A run that is stopped while step 4 is measured ends there, as one never stopped.

    So does one that is killed after that decision: its checkpoint of step 4 is that of a run that was over.
    """
    keys: dict[str, Any] = {
        "columns": {"text": "chosen"},
        "stop_when": ["no-gain:1"],
        "checkpoint_every": 4,
    }
    losses_by_step = {0: 3.0, 2: 1.0, 4: 1.0, 6: 0.5}
    for name in ("whole", "stopped", "killed"):
        run = scripted(opened(place, tmp_path / name, "sft", **keys), losses_by_step)
        if name == "stopped":
            scripted(run, {step: loss for step, loss in losses_by_step.items() if step < 4})
        if name == "killed":
            run.trainer.add_callback(DiesAtTheEnd())
        if name != "whole":
            with pytest.raises((Interrupted, Died)):
                run.train()
            run.save_checkpoint()
            run.close()
            run = scripted(opened(place, tmp_path / name, "sft", **keys), losses_by_step)
        trained(run)
        folder = RunFolder(tmp_path / name)
        assert len(losses(tmp_path / name)) == 4 and list(measured(tmp_path / name)) == [
            0,
            2,
            4,
        ], name
        assert (
            read_json(folder.held_out)["ended_early"]
            == "no gain in 1 evaluations over loss 1 of step 2"
        )
    models = [
        adapter(RunFolder(tmp_path / name).model) for name in ("whole", "stopped", "killed")
    ]
    assert same(models[0], models[1]) and same(models[0], models[2])


class Died(Exception):
    """Stands for a kill."""


class DiesAtTheEnd(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise Died


def test_a_damaged_checkpoint_is_passed_over(place: Path, tmp_path: Path) -> None:
    run = opened(
        place, tmp_path, "sft", columns={"text": "chosen"}, steps=6, checkpoint_every=2
    )
    run.trainer.add_callback(StopAfter(run, step=5))
    with pytest.raises(Interrupted):
        run.train()
    run.close()
    (
        RunFolder(tmp_path).checkpoints / "checkpoint-4" / "adapter_model.safetensors"
    ).write_bytes(b"half")
    trained(
        opened(place, tmp_path, "sft", columns={"text": "chosen"}, steps=6, checkpoint_every=2)
    )
    assert len(losses(tmp_path)) == 6 and list(measured(tmp_path)) == [0, 2, 4, 6]
    assert (RunFolder(tmp_path).checkpoints / "damaged-checkpoint-4").is_dir()


def test_other_rows_are_another_run(place: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text((place / "pairs.jsonl").read_text())
    opened(place, tmp_path / "run", "dpo", dataset=str(pairs)).close()
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS[:-1]))
    with pytest.raises(
        RunFolderError, match=r"did not begin with this \(dataset: '26 \+ 6 rows"
    ):
        opened(place, tmp_path / "run", "dpo", dataset=str(pairs))


def test_rows_that_are_all_too_long_end_the_run_in_a_line(place: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"rows do not fit into max_length, 4 tokens, and 0 are left"
    ):
        opened(place, tmp_path / "run", "reward", trl={"max_length": 4})


@pytest.mark.parametrize("num_short", [0, 2])
def test_held_out_rows_that_are_too_long_are_counted(
    num_short: int, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were left out without a word, and where all were, nothing was measured."""
    short = {"prompt": "?", "chosen": "a", "rejected": "b"}
    long = {"prompt": "Why?" * 9, "chosen": "a", "rejected": "b"}
    rows = [*[long] * 3, *[short] * num_short]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(short) + "\n" for _ in range(8)))
    keys = {"dataset": str(pairs), "eval_dataset": str(held_out), "trl": {"max_length": 10}}
    if num_short:
        opened(place, tmp_path / "run", "reward", **keys).close()
        assert "2 of 5 held-out rows fit into max_length, 10 tokens" in capsys.readouterr().out
    else:
        with pytest.raises(DataError, match=r"0 of 3 held-out rows fit.*--max-length"):
            opened(place, tmp_path / "run", "reward", **keys)


class StopAfter(TrainerCallback):
    """Asks the run to stop at the end of a step."""

    def __init__(self, run: ExampleRun, *, step: int) -> None:
        self._run, self._step = run, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            self._run.stop.set()


def test_too_few_packed_rows_say_so(place: Path, tmp_path: Path) -> None:
    keys = {"columns": {"text": "chosen"}, "trl": {"packing": True, "max_length": 512}}
    with pytest.raises(
        DataError, match=r"8 rows are packed into \d sequences of max_length, 512"
    ):
        opened(place, tmp_path / "run", "sft", **keys, limit=10, held_out=2, steps=1)


def test_rows_with_pictures_keep_their_own_template_arguments(tmp_path: Path) -> None:
    """Arrow alone would give each row the keys of all, as null: a template takes that for a refusal to think."""
    rows = [
        {"prompt": [], "images": [], "chat_template_kwargs": arguments}
        for arguments in ({"enable_thinking": True}, {})
    ]
    made = _rows(rows, RunFolder(tmp_path))
    assert [row["chat_template_kwargs"] for row in made] == [{"enable_thinking": True}, {}]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_with_pictures_teach(method: str, lora: bool, tmp_path: Path) -> None:
    """Each picture has one colour, under one question; the eyes learn too, or stay what they were under LoRA."""
    model, colours = (
        write_tiny_vision_model(tmp_path / "eyes"),
        ("red", "lime", "blue", "white"),
    )
    for colour in colours:
        Pillow.new("L" if colour == "white" else "RGB", (8, 8), colour).save(
            tmp_path / f"{colour}.png"
        )
    rows = [
        {"prompt": "Which?", "image": f"{name}.png", "completion": name} for name in colours
    ]
    pairs = [
        {**row, "chosen": row.pop("completion"), "rejected": "none"} for row in map(dict, rows)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in (pairs if method == "dpo" else rows) * 4)
    )
    settings: dict[str, Any] = {"model": str(model), "dataset": str(file), "held_out": 0}
    run = opened(
        tmp_path, tmp_path / "out", method, **settings, **({} if lora else {"lora": None})
    )
    before = {
        name: weight.detach().clone() for name, weight in run.trainer.model.named_parameters()
    }
    seen = next(iter(run.trainer.get_train_dataloader()))["pixel_values"]
    assert len({pixels.numpy().tobytes() for pixels in seen}) > 1
    trained(run)
    losses = [row["loss"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    moved = {
        name
        for name, weight in run.trainer.model.named_parameters()
        if not torch.equal(weight, before[name])
    }
    assert any("vision_tower" in name or "projector" in name for name in moved) != lora
    assert (tmp_path / "out" / "model" / "processor_config.json").is_file()
