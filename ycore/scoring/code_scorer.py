"""The reward `code` as a scorer: each completion's program meets its row's tests as soon as it is written."""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import PromptSet
from ycore.rewards.builtin import settings_of
from ycore.rewards.code import (
    CodeSettings,
    StdioTests,
    UnitTests,
    check_tests,
    code_of,
    program_of,
    reaches,
    row_tests,
    same_output,
)
from ycore.run.metrics import CountMeter
from ycore.run.reports import this_rank
from ycore.sandbox.level import choose_level, require_sandbox
from ycore.sandbox.program_pool import PROGRAM_LIMITS, ProgramPool, ScriptResult
from ycore.scoring.scoring import PendingGroup, Scorer, ScorerContext
from ycore.types import Completion, Prompt, Score

_MAX_AT_ONCE = 16


@dataclass
class CodeMeter(CountMeter):
    """All code rewards of a run. Of each program: how it ended, one of these, and the seconds of its tests."""

    programs: float = 0
    passed: float = 0
    no_code: float = 0
    compile_errors: float = 0
    run_errors: float = 0
    timeouts: float = 0
    memory: float = 0
    infra_errors: float = 0
    unreachable: float = 0
    seconds: float = 0

    def summary(self) -> Mapping[str, float]:
        counts = asdict(self)
        seconds = counts.pop("seconds")
        metrics = {f"ycore/code/{name}": float(count) for name, count in counts.items()}
        metrics["ycore/code/latency_s"] = seconds / max(1.0, self.programs)
        return metrics

    def note(self, status: str) -> None:
        """Count how a program ended, but for one that ran to its end: its values may still be wrong."""
        if status not in ("ok", "ready"):
            name = _COUNTED.get(status, "run_errors")
            setattr(self, name, getattr(self, name) + 1)


_COUNTED = {
    "compile_error": "compile_errors",
    "timeout": "timeouts",
    "memory": "memory",
    "infra_error": "infra_errors",
}


@dataclass(eq=False)
class CodeScorer(Scorer):
    """One `code` reward. A program that fails scores 0; one that could not be run, twice, is masked."""

    name: str
    settings: CodeSettings
    programs: ProgramPool
    _: KW_ONLY
    meter: CodeMeter = field(default_factory=CodeMeter)

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        require_sandbox(choose_level(config.sandbox.level), f"reward {spec.reward!r}")
        check_tests(spec, prompts.columns, prompts.prompts)

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        """Build the scorer at the sandbox level of this run; it runs a program on each core, up to 16 at once."""
        settings = settings_of(spec, CodeSettings)
        num_cores = len(os.sched_getaffinity(0)) // this_rank().local_world
        level = choose_level(context.config.sandbox.level)
        programs = ProgramPool(
            require_sandbox(level, f"reward {spec.reward!r}"),
            at_once=min(_MAX_AT_ONCE, max(1, num_cores)),
            log=context.folder.log("programs"),
            run_id=context.folder.run_id,
            limits=replace(PROGRAM_LIMITS, memory=settings.memory_mb * 2**20),
            packages=settings.packages,
        )
        return cls(context.names[source], settings, programs, meter=context.meter(CodeMeter))

    async def start(self, *, timeout_s: float) -> None:
        await self.programs.start()

    async def close(self) -> None:
        await self.programs.close()

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        return await self.score_program(group.draw.prompt, await group.tasks_G[index])

    async def score_program(self, prompt: Prompt, completion: Completion) -> Score:
        """Run the completion's program against the row's tests."""
        try:
            tests = row_tests(prompt, self.settings)
        except ValueError as error:  # checked before the run: the dataset was changed since
            self.meter.unreachable += 1
            return self.masked(f"row {prompt.row}: {error}")
        source = program_of(completion.full_text, tests)
        self.meter.programs += 1
        if not source.strip():
            self.meter.no_code += 1
            return Score(0.0)
        if not reaches(tests, code_of(completion.full_text, tests)):
            self.meter.unreachable += 1
            if reaches(tests, prompt.content):
                return Score(0.0)
            return self.masked(
                f"row {prompt.row}: its tests call a function that its prompt does not name"
            )
        score = await (
            self._examined(source, tests)
            if isinstance(tests, UnitTests)
            else self._fed(source, tests)
        )
        self.meter.passed += score.value == 1.0
        return score

    async def _examined(self, source: str, tests: UnitTests) -> Score:
        verdict = await self.programs.run_tests(
            source,
            tests.request(self.settings),
            deadline_s=tests.deadline_s(self.settings),
        )
        self.meter.seconds += verdict.seconds
        self.meter.note(verdict.status if verdict.status != "ok" else verdict.began)
        if verdict.status == "infra_error":
            return self.masked(verdict.problem or "the sandbox failed")
        if verdict.broken is not None:
            return self.masked(f"the row's tests cannot run: {verdict.broken}")
        return Score(
            verdict.share_passed
            if self.settings.credit == "share"
            else float(verdict.passes_all)
        )

    async def _fed(self, source: str, tests: StdioTests) -> Score:
        """Once for each input. Outputs are compared here: the program never gets one."""
        passed = 0
        worst = "ok"
        for stdin, wanted in tests.pairs:
            outcome = await self.programs.run(
                source, stdin=stdin.encode(errors="replace"), deadline_s=self.settings.timeout_s
            )
            self.meter.seconds += outcome.seconds
            if outcome.status == "infra_error":
                self.meter.note(outcome.status)
                return self.masked(outcome.problem or "the sandbox failed")
            worst = _kind(outcome) if worst == "ok" else worst
            right = outcome.status == "ok" and same_output(
                outcome.output, wanted, self.settings.tolerance
            )
            passed += right
            if not right and self.settings.credit == "all":
                break
        self.meter.note(worst)
        share = passed / len(tests.pairs)
        return Score(share if self.settings.credit == "share" else float(share == 1.0))


def _kind(outcome: ScriptResult) -> str:
    """A script's status; one that Python could not compile ends with a SyntaxError as its last words."""
    last = outcome.errors.rstrip().rpartition(b"\n")[2]
    is_compile = outcome.status == "error" and last.startswith(
        (b"SyntaxError", b"IndentationError", b"TabError")
    )
    return "compile_error" if is_compile else outcome.status
