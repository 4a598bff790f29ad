"""Use a trained model: chat with it, serve it, export it, push it to the hub with a card."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ycore.api.run_settings import stored_settings
from ycore.config.algorithms import ALGORITHMS, find_algorithm
from ycore.engine.commands import EngineSpec, engine_command, engine_environment, kv_cache_gib
from ycore.errors import ConfigError, ModelError, RunError, RunFolderError
from ycore.launch.engines import model_length
from ycore.launch.guardian import guarded
from ycore.launch.layout import this_machine
from ycore.models.convert import ADAPTER_CONFIG, is_adapter, language_model_class
from ycore.models.fetch import fetch_named
from ycore.models.model_facts import sighted_family
from ycore.models.names import first_line, hub_id, read_settings
from ycore.placement.placement import JUDGE
from ycore.run.claim import Claim, stored_config
from ycore.run.files import RunFolder, read_json
from ycore.run.interrupt import StopRequests
from ycore.run.text import Say, printable, topic
from ycore.run.work import quiet, working

_SERVED_ON_GPU = 256, 32_768  # completions at once, and tokens of one with its prompt
_SERVED_ON_CPU = 8, 4096
_LEFT_OUT = "training_args.bin"  # pickled, and about this machine


def trained_model(name: str, *, best: bool = False) -> str:
    """Return the last or best model of a run's folder; any other name of a model as it is."""
    folder = RunFolder(Path(name).expanduser())
    if not folder.config.is_file():
        return name
    model = folder.best if best else folder.model
    if not model.is_dir():
        problem = "has saved no model yet"
        way_out = f"`ycore resume {shlex.quote(str(folder.root))}` goes on with a stopped run"
        if best:
            problem = "kept no best model; say --keep-best when it trains"
        if stored_settings(name).get("algorithm") == "eval":
            problem, way_out = "is an evaluation", "name the model that it measured"
        raise RunFolderError(f"the run {folder.root} {problem}; {way_out}")
    return str(model)


def load_language_model(folder: str, *, dtype: str, trust_remote_code: bool = False) -> Any:
    """Load a model that writes text with transformers, also one that reads pictures."""
    model_class = language_model_class(sighted_family(folder) is not None)
    return model_class.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)


def has_language_model(run: RunFolder, *, best: bool) -> bool:
    """Whether the run has saved a model that writes text."""
    algorithm = ALGORITHMS.get(stored_config(run).get("algorithm", ""))
    writes = algorithm is not None and not algorithm.trains_reward_model
    return writes and (run.best if best else run.model).is_dir()


def language_model(name: str, *, best: bool = False, trust_remote_code: bool = False) -> Path:
    """Return the folder of a whole language model, adapters merged; ModelError for a reward model."""
    model = trained_model(name, best=best)
    folder = fetch_named(model, trust_remote_code=trust_remote_code)
    kinds = read_settings(folder / "config.json").get("architectures") or []
    if any("SequenceClassification" in kind for kind in kinds):
        raise ModelError(
            f"{model} is a reward model, which scores and does not write; give a policy's run or model"
        )
    return folder


# -- chat --------------------------------------------------------------------------------------------------------------


def turns_before(name: str, *, system_prompt: str | None = None) -> list[dict[str, str]]:
    """Return the turns before every prompt in training: the system prompt, unless another is given, and `few_shot`."""
    config = _settings_of(name)
    text = config.get("system_prompt") if system_prompt is None else system_prompt or None
    system = [] if text is None else [{"role": "system", "content": text}]
    return [*system, *config.get("few_shot", [])]


def template_arguments(name: str) -> dict[str, Any]:
    """Return what the run gave its chat template in training (`chat_template_kwargs`); {} for a model without a run."""
    return _settings_of(name).get("trl", {}).get("chat_template_kwargs") or {}


def _settings_of(name: str) -> Mapping[str, Any]:
    """Return the settings of a run, named by its folder or by that of its model; {} for another model."""
    settings = stored_settings(name)
    folder = Path(name).expanduser()
    run = RunFolder(folder.parent)
    if not settings and folder in (run.model, run.best):
        return stored_settings(str(run.root))
    return settings


class ChatSettings(NamedTuple):
    """How answers are sampled, the turns `before` a conversation, and what the chat template gets beside the turns."""

    max_tokens: int
    temperature: float
    seed: int
    before: Sequence[dict[str, str]]
    template_arguments: Mapping[str, Any]
    trust_remote_code: bool = False


class Chat:
    """A conversation with a model in this process, by transformers: `chat.say("2 + 2?")`."""

    def __init__(self, folder: Path, settings: ChatSettings) -> None:
        import torch
        from transformers import AutoTokenizer

        self._settings = settings
        trusts = settings.trust_remote_code
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)
        self._is_chat = bool(self._tokenizer.chat_template)
        self._turns = list(settings.before)
        if settings.before and not self._is_chat:
            raise ModelError(
                f"the model in {folder} has no chat template, so no system prompt either; leave it out"
            )
        dtype = "auto" if this_machine().has_bfloat16 else "float32"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_language_model(str(folder), dtype=dtype, trust_remote_code=trusts)
        self._model = model.eval().to(device)

    def say(self, text: str, *, show: Say | None = None) -> str:
        """Return the answer to the next turn, the same for the same turns and seed; `show` gets its words meanwhile."""
        if not self._is_chat:  # no conversation: each text is continued by itself
            return self._write(text, seed=self._settings.seed, show=show)
        self._turns.append({"role": "user", "content": text})
        seed = self._settings.seed + len(self._turns)
        answer = self._write(self._turns, seed=seed, show=show)
        self._turns.append({"role": "assistant", "content": answer})
        return answer

    def _write(self, prompt: str | list[dict[str, str]], *, seed: int, show: Say | None) -> str:
        """Continue a text, or answer the last of the turns."""
        import torch
        from transformers import TextStreamer

        from ycore.engine.transformers_engine import plain_generation  # it imports torch

        streamer = None
        if show is not None:
            streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
            streamer.on_finalized_text = lambda words, stream_end=False: show(words)
        if isinstance(prompt, str):
            inputs = self._tokenizer(prompt, return_tensors="pt")
        else:
            inputs = self._tokenizer.apply_chat_template(
                prompt,
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
                **self._settings.template_arguments,
            )
        samples = self._settings.temperature > 0
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        with torch.random.fork_rng(), torch.no_grad(), plain_generation(self._model):
            torch.manual_seed(seed)
            written = self._model.generate(
                **inputs.to(self._model.device),
                max_new_tokens=self._settings.max_tokens,
                streamer=streamer,
                do_sample=samples,
                top_k=0 if samples else None,
                temperature=self._settings.temperature if samples else None,
                # As in vLLM: those of the folder, and the tokenizer's.
                eos_token_id=sorted({*ends, self._tokenizer.eos_token_id} - {None}) or None,
            )
        start = inputs["input_ids"].shape[1]
        return str(self._tokenizer.decode(written[0, start:], skip_special_tokens=True))


# -- serve -------------------------------------------------------------------------------------------------------------


def check_address(host: str, port: int) -> None:
    """Raise ConfigError where nothing can listen; port 0 is any."""

    async def listen() -> None:
        (await asyncio.start_server(lambda *_: None, host, port)).close()

    try:
        asyncio.run(listen())
    except OSError as problem:
        raise ConfigError(
            f"nothing can listen at --host {host} --port {port}: {problem.strerror}; take an address of this machine, "
            "e.g. --host 127.0.0.1, and a free port"
        ) from None


def serve_command(
    folder: Path,
    *,
    name: str,
    host: str,
    port: int,
    template_arguments: Mapping[str, Any],
    trust_remote_code: bool = False,
) -> tuple[list[str], EngineSpec]:
    """Return the command line of vLLM's own server with OpenAI's interface, and the spec of its environment."""
    settings = read_settings(folder / "config.json")
    machine = this_machine()
    num_sequences, most = _SERVED_ON_GPU if machine.devices else _SERVED_ON_CPU
    length = min(most, model_length(None, settings, option="max_model_len", new_tokens=most))
    spec = EngineSpec(
        name="serve", model=folder, socket=Path("unused"), temporary=Path("unused"),
        run_id="unused", dtype="bfloat16" if machine.has_bfloat16 else "float32", max_model_len=length,
        max_num_seqs=num_sequences, seed=0,
        cores=() if machine.devices else machine.cores, devices=machine.devices[:1],
        memory_gib=kv_cache_gib(settings, length * num_sequences), gpu_memory_utilization=0.9, role=JUDGE,
        sees="vision_config" in settings, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    words = engine_command(spec)
    socket_option = words.index("--uds")
    words[socket_option : socket_option + 2] = ["--host", host, "--port", str(port)]
    words[words.index("--served-model-name") + 1] = name
    if template_arguments:
        words += ["--default-chat-template-kwargs", json.dumps(template_arguments)]
    return words, spec


def _listens(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(psutil.Error):
        connections = psutil.Process(process.pid).net_connections("tcp")
        return any(connection.status == psutil.CONN_LISTEN for connection in connections)
    return False


def serve_model(
    words: Sequence[str], spec: EngineSpec, *, environment: Mapping[str, str], say: Say
) -> int:
    """Serve until Ctrl-C, SIGTERM or a closed terminal; return the exit status. However this process ends, a guardian
    ends the server. Clients must give the key in VLLM_API_KEY, if any.
    """
    with tempfile.TemporaryDirectory(prefix="ycore-serve-") as place:
        folder = RunFolder(Path(place))
        folder.logs.mkdir()
        claim = Claim(folder)
        try:
            with StopRequests() as stops, guarded(folder, claim):
                variables = engine_environment(
                    replace(spec, run_id=folder.run_id, temporary=folder.temporary)
                )
                # Its routes change the model, and everybody here may use a port.
                del variables["VLLM_SERVER_DEV_MODE"]
                if "VLLM_API_KEY" in os.environ:
                    variables["VLLM_API_KEY"] = os.environ["VLLM_API_KEY"]
                process = subprocess.Popen(words, env={**variables, **environment})
                with working("vLLM starts"):
                    while process.poll() is None and not stops.count and not _listens(process):
                        time.sleep(0.2)
                with quiet():  # vLLM speaks
                    if process.poll() is None and not stops.count:
                        say("ready; Ctrl-C ends it")
                    while process.poll() is None and not stops.count:
                        time.sleep(0.2)
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                return 0 if stops.count else process.returncode
        finally:
            claim.release()


# -- export ------------------------------------------------------------------------------------------------------------


def export_model(folder: Path, target: Path, *, form: str, name: str) -> None:
    """Copy the whole model in `folder` to a folder (`merged`), or write one file for llama.cpp (`gguf`)."""
    if target.exists():
        raise RunFolderError(f"{target} exists; choose another --output, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    if form == "gguf":
        from ycore.models.gguf_file import write_gguf

        write_gguf(folder, target, name=name)
        return
    with working(f"copying to {target}"):
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(_LEFT_OUT))


# -- push --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def staged(
    run: Path, *, best: bool, merged: bool, repo: str, trust_remote_code: bool = False
) -> Iterator[Path]:
    """Stage the folder to push: the model, its card, the curve; removed afterwards."""
    source = Path(trained_model(str(run), best=best))
    if merged:
        source = language_model(str(run), best=best, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="ycore-push-") as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(
            source, folder, ignore=shutil.ignore_patterns(_LEFT_OUT, "README.md", "merged")
        )
        if (curve := RunFolder(run).curve).is_file():
            shutil.copyfile(curve, folder / "curve.png")
        base = _base_id(RunFolder(run))
        if base is None and is_adapter(folder):
            raise ModelError(
                f"{run} trained an adapter of a model that the hub does not have, so nobody else could load it; push "
                "the whole model with --format merged"
            )
        for path in folder.rglob(ADAPTER_CONFIG):  # it names a folder of this machine
            path.write_text(
                json.dumps(read_json(path) | {"base_model_name_or_path": base}, indent=2)
            )
        about = card(
            run,
            repo=repo,
            base=base,
            adapter=is_adapter(folder),
            has_curve=curve.is_file(),
            best=best,
        )
        (folder / "README.md").write_text(about, encoding="utf-8")
        yield folder


def _base_id(run: RunFolder) -> str | None:
    """Return the hub id of the model that the run began with; None for a folder, a file or another adapter."""
    loaded = read_json(run.engines).get("model", "") if run.engines.is_file() else ""
    return hub_id(stored_config(run)["model"], Path(loaded))


def card(
    run: Path,
    *,
    repo: str,
    base: str | None,
    adapter: bool,
    has_curve: bool,
    best: bool = False,
) -> str:
    """Write the model card: the model, how to use it, how it was trained, its evaluation."""
    import yaml

    folder = RunFolder(run)
    recorded = read_json(folder.config)
    config = recorded["config"]
    command = [_without_folder(str(word)) for word in recorded.get("command", [])]
    versions = recorded.get("versions", {}).items()
    summary = read_json(folder.summary) if folder.summary.is_file() else {}
    rewards = ", ".join(
        f"`{printable(_without_folder(reward['reward']))}`"
        for reward in config.get("rewards", [])
    )
    head = {
        "library_name": "peft" if adapter else "transformers",
        "tags": ["ycore", config["algorithm"]],
    }
    if base:
        head["base_model"] = base
    method = find_algorithm(config["algorithm"]).name.upper()
    by = f", rewarded by {rewards}" if rewards else ""
    system_option = (
        ["--system-prompt", config["system_prompt"]] if config.get("system_prompt") else []
    )
    parts = [
        f"---\n{yaml.safe_dump(head)}---",
        f"# {repo.rpartition('/')[2]}",
        f"`{base or Path(config['model']).name}` trained with {method} on `{topic(config)}`{by}, by ycore.",
        "![the run's curve](curve.png)" if has_curve else "",
        _measured(summary, best=best),
        f"## Use\n\n```sh\n{printable(shlex.join(['ycore', 'chat', repo, *system_option]))}\n```",
        f"## How it was trained\n\n```sh\n{printable(shlex.join(command))}\n```"
        if command
        else "",
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions if version)}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _without_folder(word: str) -> str:
    """Leave the folders of an absolute path out, which tell about this machine only; `judge:/home/a/b.yaml` too."""
    return re.sub(r"(^|[:=])(~|/(?!/))([^/]*/)*", r"\1", word)


def _measured(summary: Mapping[str, Any], *, best: bool) -> str:
    """Write the evaluation on held-out rows as a table; the training reward where there was none."""
    ends = summary.get("held_out") or {}
    rows = []
    figures = summary.get("best") if best else ends.get("after")
    for name, after in (figures or {}).items():
        before = ends["before"].get(name)
        if isinstance(before, float) and not name.endswith(("/low", "/high")):
            rows.append(f"| {name} | {before:.3f} | {after:.3f} |")
    if rows:
        head = "| on held-out rows | before | after |\n|---|---|---|"
        return "## Evaluation\n\n" + "\n".join([head, *rows])
    if best or summary.get("reward_last") is None:
        return ""
    return f"The training reward went from {summary['reward_first']:.3f} to {summary['reward_last']:.3f}."


def push(folder: Path, *, repo: str, private: bool, say: Say) -> None:
    """Send the folder to a model repository of the hub, and create it if it does not exist."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        with working(f"sending to {repo}"):
            sent = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message="Upload a model trained with ycore",
            )
    except (HfHubHTTPError, OSError, ValueError) as problem:
        raise RunError(
            f"could not push to {repo}: {first_line(problem)}; log in with `hf auth login`, or set HF_TOKEN"
        ) from None
    say(f"pushed to {sent}")


def sizes(folder: Path) -> Iterable[tuple[str, str]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield str(path.relative_to(folder)), f"{path.stat().st_size:,} bytes"
