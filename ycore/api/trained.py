"""What a person does with a trained model: talk to it, serve it, export it, push it with a card."""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from ycore.config.algorithms import find_algorithm
from ycore.engine.commands import EngineSpec, engine_command, engine_environment, kv_cache_gib
from ycore.errors import ModelError, RunError, RunFolderError
from ycore.launch.engines import model_length
from ycore.launch.layout import this_machine
from ycore.models.convert import ADAPTER_CONFIG, is_adapter
from ycore.models.fetch import fetch_model
from ycore.models.folder import has_chat_template
from ycore.models.folder import read_json as read_settings
from ycore.models.names import hub_id, resolve_model
from ycore.placement.placement import JUDGE
from ycore.run.files import read_json
from ycore.run.paths import RunFolder
from ycore.run.text import Say, printable, topic

_AT_ONCE = 8  # requests that a served model answers at once on a CPU
_SERVED_LENGTH = 4096
_ANSWER_WITHIN_S = 120.0  # for the next piece of an answer
_LEFT_OUT = ("training_args.bin",)  # pickled, and about this machine


def trained_model(name: str, *, best: bool = False) -> str:
    """The model of a run's folder, its last or its best one; any other name of a model as it is."""
    folder = RunFolder(Path(name).expanduser())
    if not folder.config.is_file():
        return name
    model = folder.best if best else folder.model
    if not model.is_dir():
        why = (
            "kept no best model; say --keep-best when it trains"
            if best
            else "has saved no model yet"
        )
        raise RunFolderError(
            f"the run {folder.root} {why}; `ycore resume {folder.root}` goes on with a stopped run"
        )
    return str(model)


def writing_model(name: str, *, best: bool = False) -> Path:
    """The folder of a whole model that writes, adapters merged; a reward model is refused."""
    model = trained_model(name, best=best)
    folder = fetch_model(resolve_model(model))
    kinds = read_settings(folder / "config.json").get("architectures") or []
    if any("SequenceClassification" in kind for kind in kinds):
        raise ModelError(
            f"{model} is a reward model, which scores and does not write; give a policy's run or model"
        )
    return folder


# -- chat --------------------------------------------------------------------------------------------------------------


def turns_before(name: str, *, system_prompt: str | None = None) -> list[dict[str, str]]:
    """What a run put before every prompt as it trained: its system prompt, unless another is given, and `few_shot`."""
    run = RunFolder(Path(name).expanduser())
    config = read_json(run.config)["config"] if run.config.is_file() else {}
    text = config.get("system_prompt") if system_prompt is None else system_prompt or None
    return [
        *([] if text is None else [{"role": "system", "content": text}]),
        *config.get("few_shot", []),
    ]


class Talker:
    """One model and its side of a conversation, which begins with the turns `before`. `talker.say("2 + 2?")`"""

    def __init__(
        self,
        folder: Path,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        before: Sequence[dict[str, str]] = (),
    ) -> None:
        self._is_chat, self._turns = has_chat_template(folder), list(before)
        self._max_tokens, self._temperature, self._seed = max_tokens, temperature, seed
        if before and not self._is_chat:
            raise ModelError(
                f"the model in {folder} has no chat template, so no system prompt either; leave it out"
            )

    def say(self, text: str, *, show: Say | None = None) -> str:
        """The answer to the next turn; the same for the same turns and seed. `show` gets its words meanwhile."""
        if not self._is_chat:  # no conversation: each text is continued by itself
            return self._write(text, seed=self._seed, show=show)
        self._turns.append({"role": "user", "content": text})
        answer = self._write(self._turns, seed=self._seed + len(self._turns), show=show)
        self._turns.append({"role": "assistant", "content": answer})
        return answer

    def _write(self, asked: str | list[dict[str, str]], *, seed: int, show: Say | None) -> str:
        """What the model writes after a text, or in answer to turns."""
        raise NotImplementedError


class TransformersTalker(Talker):
    """The same by transformers, in this process."""

    def __init__(self, folder: Path, **how: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__(folder, **how)
        dtype = "auto" if this_machine().has_bfloat16 else "float32"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: Any = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def _write(self, asked: str | list[dict[str, str]], *, seed: int, show: Say | None) -> str:
        import torch

        if isinstance(asked, str):
            inputs = self._tokenizer(asked, return_tensors="pt")
        else:
            inputs = self._tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        sampling: dict[str, Any] = {"do_sample": False}
        if self._temperature > 0:
            sampling = {"do_sample": True, "top_k": 0, "temperature": self._temperature}
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            written = self._model.generate(
                **inputs.to(self._model.device),
                max_new_tokens=self._max_tokens,
                streamer=self._shown_by(show),
                **sampling,
            )
        return str(
            self._tokenizer.decode(
                written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
        )

    def _shown_by(self, show: Say | None) -> Any:
        """What `generate` hands its tokens to, or None."""
        if show is None:
            return None
        from transformers import TextStreamer

        streamer: Any = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda words, stream_end=False: show(words)
        return streamer


class ServedTalker(Talker):
    """The same by an engine that `ycore serve` has started."""

    def __init__(self, folder: Path, *, address: str, name: str, **how: Any) -> None:
        super().__init__(folder, **how)
        self._address, self._name = address.rstrip("/"), name

    def _write(self, asked: str | list[dict[str, str]], *, seed: int, show: Say | None) -> str:
        is_text = isinstance(asked, str)
        route, key = ("completions", "prompt") if is_text else ("chat/completions", "messages")
        sampling = {"max_tokens": self._max_tokens, "temperature": self._temperature, "seed": seed}
        sampling |= {
            "top_p": 1,
            "top_k": 0,
        }  # and not what the model's folder says, as transformers is asked
        body = {"model": self._name, key: asked, "stream": True, **sampling}
        answer = []
        for choice in self._streamed(route, body):
            words = (choice["text"] if is_text else choice["delta"].get("content")) or ""
            answer.append(words)
            if show is not None:
                show(words)
        return "".join(answer)

    def _streamed(self, route: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The answer's pieces as the server sends them (server-sent events)."""
        secret = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        timeout = httpx.Timeout(_ANSWER_WITHIN_S, connect=5.0)
        try:
            with httpx.stream(
                "POST", f"{self._address}/{route}", json=body, headers=headers, timeout=timeout
            ) as reply:
                if reply.is_error:
                    why = f"{reply.status_code}: {reply.read().decode(errors='replace')[:300]}"
                    raise RunError(f"{self._address} answered {why}; is {self._name} served there?")
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        yield from json.loads(line.removeprefix("data: "))["choices"]
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            way_out = f"start it with `ycore serve {self._name}`, and give its address, e.g. http://127.0.0.1:8000/v1"
            raise RunError(f"no answer from {self._address}: {problem}; {way_out}") from None


# -- serve -------------------------------------------------------------------------------------------------------------


def serve_command(folder: Path, *, name: str, host: str, port: int) -> tuple[list[str], EngineSpec]:
    """The command line of vLLM's own server with OpenAI's interface, and what its environment follows from."""
    settings, machine = read_settings(folder / "config.json"), this_machine()
    length = min(_SERVED_LENGTH, model_length(None, settings, option="--max-model-len"))
    spec = EngineSpec(
        name="serve", model=folder, socket=Path("unused"), temporary=Path(tempfile.gettempdir()),
        run_id=secrets.token_hex(6), dtype="bfloat16" if machine.has_bfloat16 else "float32", max_model_len=length,
        max_num_seqs=_AT_ONCE, seed=0,
        cores=None if machine.devices else machine.cores, devices=machine.devices[:1],
        memory_gib=kv_cache_gib(settings, length * _AT_ONCE), gpu_memory_utilization=0.9, role=JUDGE,
    )  # fmt: skip
    words = engine_command(spec)
    at = words.index("--uds")
    words[at : at + 2] = ["--host", host, "--port", str(port)]
    words[words.index("--served-model-name") + 1] = name
    return words, spec


def serve(words: Sequence[str], spec: EngineSpec) -> int:
    """Serve until Ctrl-C; the exit status. The key that clients must give is the one in VLLM_API_KEY, if any."""
    with tempfile.TemporaryDirectory(prefix="ycore-serve-") as temporary:
        environment = engine_environment(spec) | {"TMPDIR": temporary}
        del environment[
            "VLLM_SERVER_DEV_MODE"
        ]  # its routes change the model, and a port is for everybody here
        environment |= (
            {"VLLM_API_KEY": os.environ["VLLM_API_KEY"]} if "VLLM_API_KEY" in os.environ else {}
        )
        process = subprocess.Popen(list(words), env=environment)
        try:
            return process.wait()
        except KeyboardInterrupt:  # the server has the terminal's Ctrl-C too
            return 0
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


# -- export ------------------------------------------------------------------------------------------------------------


def export(folder: Path, target: Path, *, form: str, name: str) -> None:
    """The whole model in `folder` as a folder of its own (`merged`), or as one file for llama.cpp (`gguf`)."""
    if target.exists():
        raise RunFolderError(f"{target} exists; choose another --output, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    if form == "gguf":
        from ycore.models.gguf_file import write_gguf

        write_gguf(folder, target, name=name)
        return
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*_LEFT_OUT))


# -- push --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def staged(run: Path, *, best: bool, merged: bool, repo: str) -> Iterator[Path]:
    """A folder with what is sent: the model, its card, the curve; removed afterwards."""
    source = Path(trained_model(str(run), best=best))
    if merged:
        source = writing_model(str(run), best=best)
    with tempfile.TemporaryDirectory(prefix="ycore-push-") as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(
            source, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT, "README.md", "merged")
        )
        if (curve := RunFolder(run).curve).is_file():
            shutil.copyfile(curve, folder / "curve.png")
        base = _base_id(RunFolder(run))
        if base is None and is_adapter(folder):
            what = f"{run} trained an adapter of a model that the hub does not have, so nobody else could load it"
            raise ModelError(f"{what}; push the whole model with --format merged")
        for path in folder.rglob(ADAPTER_CONFIG):  # it names a folder of this machine
            path.write_text(
                json.dumps(read_json(path) | {"base_model_name_or_path": base}, indent=2)
            )
        about = card(
            run, repo=repo, base=base, adapter=is_adapter(folder), has_curve=curve.is_file()
        )
        (folder / "README.md").write_text(about, encoding="utf-8")
        yield folder


def _base_id(run: RunFolder) -> str | None:
    """The hub id of the model that the run began with; None where that was a folder, a file or another adapter."""
    loaded = read_json(run.engines).get("model", "") if run.engines.is_file() else ""
    return hub_id(read_json(run.config)["config"]["model"], Path(loaded))


def card(run: Path, *, repo: str, base: str | None, adapter: bool, has_curve: bool) -> str:
    """The model card: what it is, how to use it, how it was trained, what was measured."""
    import yaml

    folder = RunFolder(run)
    told = read_json(folder.config)
    config, command = told["config"], told.get("command", [])
    summary = read_json(folder.summary) if folder.summary.is_file() else {}
    rewards = ", ".join(f"`{printable(one['reward'])}`" for one in config.get("rewards", []))
    head = {
        "library_name": "peft" if adapter else "transformers",
        "tags": ["ycore", config["algorithm"]],
    }
    head |= {"base_model": base} if base else {}
    method = find_algorithm(config["algorithm"]).name.upper()
    by = f", rewarded by {rewards}" if rewards else ""
    asked_with = ["--system-prompt", config["system_prompt"]] if config.get("system_prompt") else []
    parts = [
        f"---\n{yaml.safe_dump(head)}---",
        f"# {repo.rpartition('/')[2]}",
        f"`{base or Path(config['model']).name}` trained with {method} on `{topic(config)}`{by}, by ycore.",
        "![the run's curve](curve.png)" if has_curve else "",
        _measured(summary),
        f"## Use\n\n```sh\n{printable(shlex.join(['ycore', 'chat', repo, *asked_with]))}\n```",
        f"## How it was trained\n\n```sh\n{printable(shlex.join(map(str, command)))}\n```"
        if command
        else "",
        f"```yaml\n{yaml.safe_dump(_settings(config), sort_keys=False)}```",
        f"Versions: {', '.join(f'{name} {version}' for name, version in told.get('versions', {}).items() if version)}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is empty, and what is only about the machine."""
    own = ("output", "processes", "restarts", "engine", "reward_workers", "sandbox", "replay")
    return {
        name: value
        for name, value in config.items()
        if name not in own and value not in (None, [], {})
    }


def _measured(summary: Mapping[str, Any]) -> str:
    """The evaluation on held-out rows as a table; the training reward where there was none."""
    ends = summary.get("held_out") or {}
    before, after = ends.get("before") or {}, ends.get("after") or {}
    names = [
        name
        for name, value in after.items()
        if isinstance(value, float) and not name.endswith(("/low", "/high"))
    ]
    rows = []
    for name in names:
        low, high = after.get(f"{name}/low"), after.get(f"{name}/high")
        spread = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
        first = f"{before[name]:.3f}" if isinstance(before.get(name), float) else ""
        rows.append(f"| {name} | {first} | {after[name]:.3f} | {spread} |")
    if rows:
        head = "| on held-out rows | before | after | 95 % interval |\n|---|---|---|---|"
        return "## Evaluation\n\n" + "\n".join([head, *rows])
    ends = {end: summary.get(f"reward_{end}") for end in ("first", "last")}
    if any(value is None for value in ends.values()):
        return ""
    change = f"from {ends['first']:.3f} to {ends['last']:.3f}"
    return f"The training reward went {change} (means of up to five steps at either end)."


def push(folder: Path, *, repo: str, private: bool, say: Say) -> None:
    """Send the folder to a model repository of the hub, which is made where it is missing."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        sent = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload a model trained with ycore"
        )
    except (HfHubHTTPError, OSError, ValueError) as problem:
        first = str(problem).strip().splitlines()[0]
        raise RunError(
            f"could not push to {repo}: {first}; log in with `hf auth login`, or set HF_TOKEN"
        ) from None
    say(f"pushed to {sent}")


def sizes(folder: Path) -> Iterable[tuple[str, str]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield str(path.relative_to(folder)), f"{path.stat().st_size:,} bytes"
