"""A trainer's process whose model is one number: `python -m tests.chaos.arithmetic_trainer FOLDER`.

It starts at once, and everything that it writes goes through the package: the journal, metrics, the trace, checkpoints and
the model. Its steps are exact, so that a resume can be compared to the bit, a thousand times.
"""

import json
import os
import random
import sys
import threading
from pathlib import Path

from ycore.errors import Interrupted
from ycore.round.journal import Journal
from ycore.run.claim import check_contents
from ycore.run.files import (
    RunFolder,
    make_folder,
    read_json,
    sync_tree,
    write_bytes_atomic,
    write_json_atomic,
)
from ycore.run.metrics import MetricsWriter
from ycore.run.resuming import (
    CheckpointWriter,
    checkpoint_of,
    controller_file,
    newest_for,
)
from ycore.run.trace import TRAIN, Mark, TraceWriter
from ycore.trainer import __main__ as trainer
from ycore.types import Completion, Draw, Group, Prompt, Score

CONTENTS = "YCORE_FAULT_CONTENTS"
"""The variable with what the run learns from, whose fingerprints would take this process seconds."""

MODULE = "tests.chaos.arithmetic_trainer"
MODEL = "value.safetensors"


class ArithmeticRun:
    def __init__(self, root: Path) -> None:
        self.stop = threading.Event()
        self._folder = folder = RunFolder(root)
        self._num_steps = int(read_json(folder.config)["config"]["steps"])
        self._journal = Journal(folder.journal, rank=0)
        self._writer = CheckpointWriter(
            folder, expected_bytes=1000, keep=2, prune=self._journal.prune
        )
        check_contents(folder, json.loads(os.environ[CONTENTS]))
        self._metrics = MetricsWriter(folder.metrics)
        self._trace = TraceWriter(folder.trace)
        self._step = newest_for(folder.checkpoints, world=1, say=print)
        self._value = 0
        if self._step:
            newest = checkpoint_of(folder.checkpoints, self._step)
            self._value = read_json(newest / controller_file(0))["value"]
        self._metrics.forget_after(self._step)

    def train(self) -> None:
        while self._step < self._num_steps:
            if self.stop.is_set():
                raise Interrupted(f"stopped after step {self._step}")
            self._take_step()
            if self._step % 2 == 0:
                self.save_checkpoint()

    def _take_step(self) -> None:
        self._folder.step_began.touch()
        committed = self._journal.read(self._step)
        if committed is None:
            self._journal.commit(self._step, [self._group()], {"value": self._value})
            committed = self._journal.read(self._step)
            assert committed is not None
        (group,) = committed.groups
        token_ids = group.completions[0].token_ids
        for token_id in token_ids:
            self._value = (self._value * 31 + token_id) % (10**9 + 7)
        self._step += 1
        self._trace.add(Mark(TRAIN, 0, float(self._step)))
        self._trace.flush()
        row = {"step": self._step, "reward": sum(token_ids) / 1000, "loss": self._value / 10**9}
        self._metrics.write(row | {"ycore/time/step": 0.01})

    def _group(self) -> Group:
        drawn = random.Random(self._step)
        token_ids = tuple(drawn.randrange(100) for _ in range(8))
        completion = Completion(
            token_ids=token_ids,
            logprobs=(0.0,) * 8,
            text="",
            finish_reason="stop",
            policy_version=self._step,
        )
        draw = Draw(self._step, Prompt(row=0, content="", columns={}), (1,))
        return Group(draw, (completion,), ((Score(0.5),),))

    def save_checkpoint(self) -> None:
        if self._writer.saved_step == self._step:
            return
        with self._writer.saving(self._step) as staged:
            checkpoint = checkpoint_of(staged, self._step)
            make_folder(checkpoint)
            write_json_atomic(checkpoint / controller_file(0), {"value": self._value})
            for name in ("trainer_state.json", "rng_state.pth", MODEL):
                (checkpoint / name).write_bytes(b"%d" % self._value)

    def save(self) -> None:
        make_folder(self._folder.model)
        write_bytes_atomic(self._folder.model / MODEL, b"%d" % self._value)
        sync_tree(self._folder.model)

    def close(self) -> None:
        self._metrics.close()


if __name__ == "__main__":
    trainer.open_run = ArithmeticRun
    sys.exit(trainer.main())
