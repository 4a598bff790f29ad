"""Secrets are hidden in texts, URLs, commands and settings, and nothing else is."""

import pytest

from ycore.run.secrets import (
    HIDDEN,
    has_hidden_part,
    is_secret,
    looks_random,
    redact,
    redact_command,
    redact_text,
)

PAT = "github_pat_" + "11ABCDEFG0" * 3
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
RANDOM = "9f86d081884c7d659a2f"

HIDES = {
    PAT: HIDDEN,
    AWS: HIDDEN,
    JWT: HIDDEN,
    "ghp_" + "a1" * 18: HIDDEN,
    "glpat-" + "a1" * 10: HIDDEN,
    "xoxb-1234567890-abcdef": HIDDEN,
    "AIza" + "Sy1" * 12: HIDDEN,
    "sk-ant-api03-" + "a1" * 20: HIDDEN,
    f"as {PAT}.": f"as github_pat_{HIDDEN}.",
    f"id={AWS};": f"id=AKIA{HIDDEN};",
    "https://host/v1?token=abc": f"https://host/v1?token={HIDDEN}",
    "https://host/v1?a=1&api_key=abc&b=2": f"https://host/v1?a=1&api_key={HIDDEN}&b=2",
    "https://host/v1?key=abc": f"https://host/v1?key={HIDDEN}",
    "https://host/f?X-Amz-Signature=abc&X-Amz-Date=1": f"https://host/f?X-Amz-Signature={HIDDEN}&X-Amz-Date=1",
    "https://host/#access_token=abc": f"https://host/#access_token={HIDDEN}",
    "postgres://user:pass@host/db": f"postgres://{HIDDEN}@host/db",
    "postgres://user:pa/ss@host/db": f"postgres://{HIDDEN}@host/db",
    "postgres://user:pa@ss@host/db": f"postgres://{HIDDEN}@host/db",
    "redis://:p@/w@rd@host:6379/0": f"redis://{HIDDEN}@host:6379/0",
    "https://abc@host/x": f"https://{HIDDEN}@host/x",
    "host=db password=abc user=me": f"host=db password={HIDDEN} user=me",
    'send {"token": "abc", "n": 1}': f'send {{"token": "{HIDDEN}", "n": 1}}',
    "Authorization: Bearer abcdefghij0123456789": f"Authorization: Bearer {HIDDEN}",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END": f"-----BEGIN RSA PRIVATE KEY-----{HIDDEN}-----END",
}
KEEPS = [
    *[
        "tokenizer",
        "max_tokens=16",
        "--max-tokens",
        "task:addition?digits=1",
        "gym:x?seed=3&tokens=2",
        "sk-short",
    ],
    *[
        "https://host:8000/v1",
        "https://host/a?max_tokens=5&n=1",
        "https://pypi.org/project/a@1.0",
        "***",
        "",
    ],
    *[
        "a password is asked for",
        "write to me@host.org",
        "pad_token=<pad>",
        "eos_token=<|endoftext|>",
        "sort_key=name",
    ],
    *[
        "meta-llama/Llama-3.1-8B-Instruct",
        "/opt/sk-learn/lib",
        "The bearer of this letter is a friend",
        "key=answer",
    ],
    *["def f(tokens=3): return tokenizer(text)", "5f86d081884c7d659a2feaa0c55ad015a3bf4f1b"],
]


@pytest.mark.parametrize("text", HIDES, ids=str)
def test_what_is_secret_in_a_text_is_hidden_and_known_to_be(text: str) -> None:
    hidden = redact_text(text)
    assert hidden == HIDES[text]
    assert redact_text(hidden) == hidden and has_hidden_part(hidden)


@pytest.mark.parametrize("text", KEEPS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text
    assert has_hidden_part(text) == (text == HIDDEN)


SECRETS = """
    token args.token rewards.0.args.token --token hub_token hubToken HF_TOKEN PGPASSWORD db_password DB_PWD passphrase
    client_secret SECRET_KEY apiKey api-key OPENAI_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID aws_session_token
    credentials Authorization private_key GITHUB_TOKEN api_key_2 wandb_key
"""
OTHERS = """
    tokenizer max_tokens num_tokens pad_token eos_token token_ids tokens mask sort_key key keys author tokenizer_name
    include_num_input_tokens_seen average_tokens_across_devices password_column pwd PWD secretary monkey turkey
    VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name, "abc") and redact({name: "abc"}) == {name: HIDDEN}


@pytest.mark.parametrize("name", OTHERS.split())
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name, "<pad>") and redact({name: "<pad>", "n": 3}) == {
        name: "<pad>",
        "n": 3,
    }


def test_a_random_value_of_an_unclear_name_is_hidden() -> None:
    assert (
        looks_random(RANDOM)
        and not looks_random("<|endoftext|>")
        and not looks_random("a_long_column_of_names_2")
    )
    assert redact({"weather_token": RANDOM, "key": RANDOM, "digest": RANDOM}) == {
        "weather_token": HIDDEN,
        "key": HIDDEN,
        "digest": RANDOM,
    }
    assert redact({"password": 1234, "password_b": True, "token": None}) == {
        "password": HIDDEN,
        "password_b": True,
        "token": None,
    }


def test_a_command_with_new_shapes() -> None:
    words = [
        "--token",
        "abc",
        "--set",
        "rewards.0.args.token=abc",
        "--dataset",
        "https://u:p/q@h/x?token=abc",
        "--steps=3",
    ]
    assert redact_command(words) == [
        *["--token", HIDDEN, "--set", f"rewards.0.args.token={HIDDEN}"],
        *["--dataset", f"https://{HIDDEN}@h/x?token={HIDDEN}", "--steps=3"],
    ]


def test_ordinary_settings_stay() -> None:
    settings = {
        "max_tokens": 16,
        "pad_token": "<pad>",
        "num_tokens": 3,
        "mask": ["a"],
        "text": "sk-short",
        "n": None,
    }
    assert redact(settings) == settings


def test_secrets_go_whatever_they_are_nested_in() -> None:
    nested = {
        "trl": [{"hub_token": "a", "openai_api_key": "b", "password": "c"}],
        "hub_token": None,
    }
    assert redact(nested) == {
        "trl": [{"hub_token": HIDDEN, "openai_api_key": HIDDEN, "password": HIDDEN}],
        "hub_token": None,
    }


def test_a_command_keeps_everything_else() -> None:
    command = [
        "ycore",
        "--max-tokens",
        "16",
        "--hub-token",
        "a",
        "--steps",
        "3",
        "--hub_token=b",
    ]
    assert redact_command(command) == [
        *["ycore", "--max-tokens", "16", "--hub-token", HIDDEN, "--steps", "3"],
        f"--hub_token={HIDDEN}",
    ]
