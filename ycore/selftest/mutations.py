"""Seeded defects: small patches that each break one promise, to see whether the scorecard notices.

Nearly all of them leave a run that is never disturbed as it is; only a resume, a fault or a look at the disk tells.

Not here: applying them (`copies`), and the battery that looks for them (`rows_mutation`).
"""

from ycore.selftest.copies import Edit, Patch

_DURABLE = "ycore/trl/checkpointing.py"
_CHECKPOINTS = "ycore/run/checkpoints.py"
_STATE = "ycore/round/journal.py"
_ENGINE = "ycore/engine/vllm_engine.py"

_LOADED = "        super()._load_optimizer_and_scheduler(checkpoint)\n"
_LOAD = f"    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:\n{_LOADED}"
_ASKED = (
    '        answer = await self._server.ask("POST", "/v1/completions", request)\n'
    '        choice = answer["choices"][0]\n'
)
_NOTHING = {"token_ids": [6], "logprobs": {"token_logprobs": [0.0]}, "text": "0", "finish_reason": "stop"}

IN_PLACE = Patch(
    "checkpoint written in place",
    (
        Edit(
            "ycore/trainer/saved_state.py",
            "            if leads:\n                self._stage(staged)\n",
            "            if leads:\n                self._stage(staged)\n"
            "                place = checkpoint_of(self._folder, step)\n"
            "                place.mkdir(exist_ok=True)\n"
            "                (staged / place.name).symlink_to(place.resolve())\n",
        ),
        Edit(
            _CHECKPOINTS,
            "    if place.is_dir():\n        _drop(place)\n    os.rename(staged, place)\n",
            "    staged.unlink()\n",
        ),
    ),
)

MUTATIONS: tuple[Patch, ...] = (
    Patch(
        # Either alone keeps a resumed run exact: both must be gone.
        "random generators neither restored nor seeded anew",
        (
            Edit(_DURABLE, _LOAD, f"    def _load_rng_state(self, checkpoint: Any) -> None:\n        pass\n\n{_LOAD}"),
            Edit(
                "ycore/trl/seam.py",
                '        identity = f"{use}/',
                '        return\n        identity = f"{use}/',
            ),
        ),
    ),
    Patch("optimizer not restored", (Edit(_DURABLE, _LOADED, f"{_LOADED}        self.optimizer.state.clear()\n"),)),
    Patch(
        "scheduler not restored",
        (
            Edit(
                _DURABLE,
                _LOADED,
                f'{_LOADED}        vars(self.lr_scheduler).get("scheduler", self.lr_scheduler).last_epoch = 0\n',
            ),
        ),
    ),
    Patch("no flush", (Edit("ycore/run/files.py", "            os.fsync(file.fileno())\n", ""),)),
    IN_PLACE,
    Patch(
        "checkpoint not verified",
        (
            Edit(
                _CHECKPOINTS,
                '    if not (checkpoint / _MANIFEST).is_file():\n        return "it has',
                '    if checkpoint.is_dir():\n        return None\n    if not checkpoint:\n        return "it has',
            ),
        ),
    ),
    Patch(
        "damaged round accepted",
        (Edit("ycore/run/resuming.py", 'hashlib.sha256(body).hexdigest() != head.get("sha256")', "head is None"),),
    ),
    Patch(
        "a sync skipped",
        (
            Edit(
                "ycore/round/step.py",
                "if self._synced != version and self._share_weights is not None:",
                "if self._synced != version and version != 3 and self._share_weights is not None:",
            ),
        ),
    ),
    Patch(
        "loaded weights not proved",
        (
            Edit(
                "ycore/engine/weights.py",
                "        if (sum(sums[name] for",
                "        if False and (sum(sums[name] for",
            ),
        ),
    ),
    Patch(
        "an engine's error swallowed",
        (
            Edit(
                _ENGINE,
                _ASKED,
                "        try:\n"
                '            answer = await self._server.ask("POST", "/v1/completions", request)\n'
                "        except Exception:\n"
                f'            answer = {{"choices": [{_NOTHING}]}}\n'
                '        choice = answer["choices"][0]\n',
            ),
        ),
    ),
    Patch("cursor off by one", (Edit(_STATE, '= state["cursor"]', '= state["cursor"] + 1'),)),
    Patch(
        "surplus not restored",
        (Edit(_STATE, '= [finished_from_json(item) for item in state["surplus"]]', "= []"),),
    ),
    Patch(
        "seeds by order, not by position",
        (
            Edit(
                "ycore/round/sampling.py",
                '    digest = hashlib.blake2b(f"{run_seed}/{position}/{index}".encode(), digest_size=8).digest()\n',
                '    _ASKED.append(1)\n    told = f"{run_seed}/{len(_ASKED)}"\n'
                "    digest = hashlib.blake2b(told.encode(), digest_size=8).digest()\n",
            ),
            Edit("ycore/round/sampling.py", "WHOLE = Shard()\n", "WHOLE = Shard()\n_ASKED: list[int] = []\n"),
        ),
    ),
    Patch(
        "steps written twice",
        (
            Edit(
                "ycore/run/metrics.py",
                'if row.get("step", 0) <= step]',
                'if row.get("step", 0) <= step + 1]',
            ),
        ),
    ),
    Patch("run not cleared away", (Edit("ycore/launch/guardian.py", "    watch.kill()\n", ""),)),
)
