from ycore.run.secrets import HIDDEN, redact, redact_command


def test_ordinary_settings_stay() -> None:
    settings = {"max_tokens": 16, "pad_token": "<pad>", "num_tokens": 3, "mask": ["a"], "text": "sk-short", "n": None}
    assert redact(settings) == settings


def test_secrets_go_whatever_they_are_nested_in() -> None:
    nested = {"trl": [{"hub_token": "a", "openai_api_key": "b", "password": "c"}], "hub_token": None}
    assert redact(nested) == {
        "trl": [{"hub_token": HIDDEN, "openai_api_key": HIDDEN, "password": HIDDEN}],
        "hub_token": None,
    }


def test_a_command_keeps_everything_else() -> None:
    command = ["ycore", "--max-tokens", "16", "--hub-token", "a", "--steps", "3", "--hub_token=b"]
    assert redact_command(command) == [
        *["ycore", "--max-tokens", "16", "--hub-token", HIDDEN, "--steps", "3"],
        f"--hub_token={HIDDEN}",
    ]
