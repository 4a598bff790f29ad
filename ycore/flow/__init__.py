"""Models that draw, as an algorithm family. This file imports nothing heavy, because `ycore --help` reads it."""

from ycore.config.algorithms import AlgorithmFamily

FAMILY = AlgorithmFamily(
    name="flow",
    resolve="ycore.flow.flow_settings:resolve_flow",
    run="ycore.flow.flow_run:FlowRun",
    model_source="ycore.flow.flow_folder:flow_model_source",
    command="ycore_cli.flow:flow",
    train="ycore_cli.flow:train_flow",
)
