"""Models that draw, as an algorithm family. This file imports nothing heavy, because `ycore --help` reads it."""

from ycore.config.algorithms import AlgorithmFamily

FAMILY = AlgorithmFamily(
    name="flow",
    config_class="ycore.flow.flow_settings:FlowConfig",
    model="models/flow-digits",
    dataset="prompts.jsonl",
    reward="rewards.py:score",
    run="ycore.flow.flow_run:FlowRun",
    command="ycore_cli.flow:flow",
    plan="ycore_cli.flow:flow_plan",
    plan_rows="ycore_cli.flow:flow_plan_rows",
    closing_rows="ycore_cli.flow:flow_closing_rows",
)
