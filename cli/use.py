"""Commands for a trained model: `ycore chat`, `serve` and `export`."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from ycore_cli import options as o
from ycore_cli.output import newest_run, print_line, print_table

from ycore.errors import ConfigError, RunFolderError, nearest
from ycore.run.text import printable
from ycore.run.work import quiet, working


def chat(
    model: o.Name = None,
    prompt: o.Ask = None,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.7,
    seed: o.Seed = 0,
    system_prompt: o.SystemPrompt = None,
    best: o.Best = False,
    trust_remote_code: o.TrustRemoteCode = False,
) -> None:
    """Talk to a run's model. Ctrl-D ends.

    The conversation begins with the system prompt and the examples that the run trained with.

    \b
    ycore chat runs/quickstart
    ycore chat runs/quickstart --prompt 'What is 3 + 4?' --temperature 0
    """
    from ycore.api import trained

    model = _named(model, "chat", best=best)
    settings = trained.ChatSettings(
        max_tokens,
        temperature,
        seed,
        trained.turns_before(model, system_prompt=system_prompt),
        trained.template_arguments(model),
        trust_remote_code,
    )
    folder = trained.language_model(model, best=best, trust_remote_code=trust_remote_code)
    with working(f"loading {model}"):
        conversation = trained.Chat(folder, settings)
    is_asked = sys.stdin.isatty() and not prompt
    if is_asked:
        print_line(f"{model}; Ctrl-D ends")
    for text in prompt or _typed(is_asked):
        with quiet():
            conversation.say(
                text, show=lambda words: print(printable(words), end="", flush=True)
            )
        print(flush=True)


def _named(model: str | None, command: str, *, best: bool) -> str:
    """Return the run or model that was named, or else the newest run with a model."""
    from ycore.api.trained import has_language_model

    if model is not None:
        return model
    return str(
        newest_run(
            command, lambda run: has_language_model(run, best=best), need="with a saved model"
        )
    )


def served_name(model: str) -> str:
    """Name a model where it is served or written: the last part of its name; for `.`, the folder's."""
    return Path(os.path.abspath(Path(model).expanduser())).name  # a link keeps its own name


def _typed(is_asked: bool) -> Iterator[str]:
    """Yield the lines of standard input that are not empty."""
    while True:
        try:
            with quiet():
                line = input("> " if is_asked else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def serve(
    model: o.Name = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = 8000,
    best_of: o.BestOf = 1,
    best_by: o.BestBy = "similarity",
    best: o.Best = False,
    trust_remote_code: o.TrustRemoteCode = False,
    dry_run: o.DryRun = False,
) -> int:
    """Serve a run's model with OpenAI's interface, by vLLM.

    Adapters are merged first. Clients that reach the port need a key only if VLLM_API_KEY is set.
    With --best-of it writes several answers, and sends the best one.

    \b
    ycore serve runs/quickstart
    ycore serve runs/quickstart --port 9000 --dry-run
    ycore serve runs/quickstart --best-of 8 --best-by rewards.py:score
    """
    from ycore.api import trained
    from ycore.engine.kinds import INSTALL_VLLM, is_vllm_installed

    if best_of == 1 and best_by != "similarity":
        raise ConfigError(
            f"--best-by {best_by} chooses among the answers of --best-of, which is 1; say --best-of 8"
        )
    model = _named(model, "serve", best=best)
    folder = trained.language_model(model, best=best, trust_remote_code=trust_remote_code)
    name = served_name(model)
    trained.check_address(host, 0 if dry_run else port)
    words, spec = trained.serve_command(
        folder,
        name=name,
        host=host,
        port=port,
        template_arguments=trained.template_arguments(model),
        trust_remote_code=trust_remote_code,
    )
    environment = {}
    if best_of > 1:
        from ycore.scoring.best_of import MIDDLEWARE, best_of_environment

        environment = best_of_environment(best_of, best_by)
        words += ["--middleware", MIDDLEWARE]
    print_table([("model", f"{name}, from {folder}"), ("address", f"http://{host}:{port}/v1")])
    if dry_run:
        if environment:
            words = ["env", *map("=".join, environment.items()), *words]
        print_table([("command", shlex.join(words))])
        print("Nothing was started; leave out --dry-run to serve.")
        return 0
    if not is_vllm_installed():
        raise ConfigError(f"ycore serve needs vLLM; {INSTALL_VLLM}")
    return trained.serve_model(words, spec, environment=environment, say=print_line)


def export(
    model: o.Name = None,
    form: o.Form = None,
    output: o.Target = None,
    best: o.Best = False,
    push: o.PushTo = None,
    private: o.Private = False,
    trust_remote_code: o.TrustRemoteCode = False,
    dry_run: o.DryRun = False,
) -> None:
    """Write a run's model for others, or push it to the hub.

    A merged folder or a GGUF file; or with --push the adapter, or with --format merged the whole model, and a card
    with the settings, the command, the curve and the evaluation. --dry-run shows what would be pushed.

    \b
    ycore export runs/quickstart --format merged --output models/sums
    ycore export runs/quickstart --format gguf --output models/sums.gguf
    ycore export runs/quickstart --push me/sums --private
    """
    if form not in (None, "merged", "gguf"):
        raise ConfigError(
            f"--format is merged or gguf; it is {form!r}{nearest(form, ['merged', 'gguf'])}"
        )
    model = _named(model, "export", best=best)
    if push is not None:
        _push(
            Path(model),
            push,
            private=private,
            merged=form == "merged",
            best=best,
            trust_remote_code=trust_remote_code,
            dry_run=dry_run,
        )
        return
    from ycore.api.trained import export_model, language_model

    form = form or "merged"
    folder = language_model(model, best=best, trust_remote_code=trust_remote_code)
    inside = Path(model) if (Path(model) / "run.json").is_file() else Path()
    name = served_name(model).removesuffix(".gguf")
    target = output or inside / (f"{name}-merged" if form == "merged" else f"{name}.gguf")
    if dry_run:
        print(f"{model} as {target}. Nothing was written; leave out --dry-run to write it.")
        return
    export_model(folder, target, form=form, name=name)
    print_table([("written", str(target))])


def _push(
    run: Path,
    repo: str,
    *,
    private: bool,
    merged: bool,
    best: bool,
    trust_remote_code: bool,
    dry_run: bool,
) -> None:
    from ycore.api import trained

    if not (run / "run.json").is_file():
        raise RunFolderError(
            f"{run} holds no run.json, so no run to write a card of; give the folder of a run"
        )
    with trained.staged(
        run, best=best, merged=merged, repo=repo, trust_remote_code=trust_remote_code
    ) as folder:
        print_table(trained.sizes(folder))
        if not dry_run:
            trained.push(folder, repo=repo, private=private, say=print_line)
            return
        for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
            print_line(f"| {line}".rstrip())
    print(f"Nothing was sent; leave out --dry-run to push to {repo}.")
