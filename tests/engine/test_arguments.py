"""Arguments for vLLM: passed on as its command line takes them, refused by name where they are ycore's or unknown."""

from dataclasses import fields

import pytest

from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.engine.arguments import check_arguments, vllm_arguments, words_of
from ycore.errors import ConfigError


def test_any_argument_comes_from_a_setting() -> None:
    given = ["engine.args.max_num_seqs=256", "engine.args.enable_prefix_caching=false", "engine.args.block_size=32"]
    config = resolve(
        recipe={"model": "m", "dataset": "task:addition", "output": "o", "rewards": ["exact_answer"]}, sets=given
    )
    assert isinstance(config, RunConfig)
    assert config.engine.args == {"max_num_seqs": 256, "enable_prefix_caching": False, "block_size": 32}


def test_the_words_are_those_of_vllms_command_line() -> None:
    arguments = {
        "max_num_seqs": 256, "enforce_eager": True, "enable_prefix_caching": False, "cudagraph_capture_sizes": [1, 8],
        "speculative_config": {"method": "ngram"}, "swap": None,
    }  # fmt: skip
    assert words_of(arguments.items()) == [
        *["--max-num-seqs", "256", "--enforce-eager", "--no-enable-prefix-caching"],
        *["--cudagraph-capture-sizes", "1", "8", "--speculative-config", '{"method": "ngram"}'],
    ]


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("host", "ycore talks to an engine over a socket of its own"),
        ("uds", "ycore talks to an engine over a socket of its own"),
        ("model", "say --model"),
        ("served_model_name", "ycore sets it by the engine's role; leave it out"),
        ("seed", "say --seed"),
        ("tensor_parallel_size", "say --set engine.tensor_parallel=2"),
        ("gpu_memory_utilization", "say --set engine.gpu_memory_utilization=0.5"),
        ("quantization", "which is proved after each sync"),
    ],
)
def test_what_ycore_sets_is_refused_with_what_to_say_instead(name: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_arguments(["max_num_seqs", name])
    assert str(refused.value).startswith(f"engine.args.{name} is not passed on: ") and way_out in str(refused.value)


def test_what_vllm_does_not_know_is_refused_with_the_nearest() -> None:
    if not vllm_arguments():
        pytest.skip("vLLM is not installed")
    check_arguments(["max_num_seqs", "block_size", "speculative_config", "compilation_config"])
    with pytest.raises(ConfigError, match=r"no argument max_num_seq \(engine\.args\); did you mean 'max_num_seqs'"):
        check_arguments(["max_num_seq"])


@pytest.mark.engine
def test_the_names_read_from_vllms_source_are_its_own() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    assert vllm_arguments() == {one.name for one in fields(arg_utils.EngineArgs) if one.name[0] != "_"}
