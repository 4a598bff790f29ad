"""Tab completion as a script of the shell's own, so that a Tab starts no Python.

It holds the commands, their options and the values of these as they are when it is written.
"""

import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ycore_cli.options import KEYS

from ycore.config.algorithms import ALGORITHMS, families, find_entry
from ycore.config.trl_fields import fields_of
from ycore.errors import ConfigError


class Option(NamedTuple):
    name: str
    help: str
    takes_value: bool
    values: tuple[str, ...]


Commands = Mapping[str, tuple[str, list[Option]]]
"""The help and the options of each command."""


def install_completion(group: Any) -> str:
    """Write the script for the user's shell, and the line that reads it into the shell's own file; say where."""
    shell = _users_shell()
    variable, default = {
        "fish": ("XDG_CONFIG_HOME", ".config"),
        "bash": ("XDG_DATA_HOME", ".local/share"),
        "zsh": ("XDG_DATA_HOME", ".local/share"),
    }[shell]
    place = Path(os.environ.get(variable, Path.home() / default))
    file = place / (
        "fish/completions/ycore.fish" if shell == "fish" else f"ycore/ycore.{shell}"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(completion_script(group), encoding="utf-8")
    reader = ""
    if shell != "fish":  # fish reads that folder by itself
        folder = os.environ.get("ZDOTDIR", Path.home()) if shell == "zsh" else Path.home()
        start_up = Path(folder) / f".{shell}rc"
        line = f"source {shlex.quote(str(file))}\n"
        if not start_up.exists() or line not in start_up.read_text(encoding="utf-8"):
            with start_up.open("a", encoding="utf-8") as end:
                end.write(f"\n{line}")
        reader = f", which {start_up} reads"
    return f"wrote {file}{reader}; begin a new shell, and say it again after an upgrade"


def completion_script(group: Any) -> str:
    """Return the script for the user's shell."""
    commands = {
        name: (command.get_short_help_str(80), list(_options(name, command)))
        for name, command in group.commands.items()
    }
    commands[""] = ("", list(_declared(group, {})))
    shell = _users_shell()
    return _fish(commands) if shell == "fish" else _candidates(commands) + _ENDS[shell]


def _users_shell() -> str:
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(
            f"completion is for bash, zsh and fish; SHELL is {shell!r}; say e.g. SHELL=bash ycore --install-completion"
        )
    return shell


# -- the words ---------------------------------------------------------------------------------------------------------


def _options(name: str, command: Any) -> Iterator[Option]:
    """Yield the options of a command, and those of TRL that it takes without declaring them."""
    is_entry = name in ALGORITHMS or name in families() or name == "eval"
    entry = find_entry(name if is_entry else "grpo")
    fields = fields_of(entry.trl_config) if entry.trl_config else {}
    values: dict[str, Sequence[str]] = {key: field.choices for key, field in fields.items()}
    for parameter in command.params:
        key = KEYS.get(parameter.name, parameter.name)
        values[parameter.name] = values.get(key) or list(_literals(entry.config, key))
    values |= {key: words() for key, words in _VALUES.items()}
    declared = list(_declared(command, values))
    yield from declared
    known = {option.name for option in declared}
    if name in ALGORITHMS:
        for field in fields.values():
            if field.option not in known:
                yield Option(field.option, "of TRL", not field.is_flag, field.choices)


def _declared(command: Any, values: Mapping[str, Sequence[str]]) -> Iterator[Option]:
    for parameter in command.params:
        if parameter.param_type_name == "option":
            found = () if parameter.is_flag else tuple(values.get(parameter.name, ()))
            for name in (*parameter.opts, *parameter.secondary_opts):
                yield Option(name, parameter.help or "", not parameter.is_flag, found)
    yield Option("--help", "Show the help.", False, ())


def _literals(annotation: Any, key: str) -> Iterator[str]:
    """Yield the words that a key of a config takes."""
    for part in filter(None, key.split(".")):
        fields = getattr(annotation, "model_fields", {})
        annotation = fields[part].annotation if part in fields else None
    for inner in get_args(annotation):
        if isinstance(inner, str):
            yield inner
        else:
            yield from _literals(inner, "")


def _recipes() -> Sequence[str]:
    from ycore.config.recipe_files import list_recipes

    return [entry.name for entry in list_recipes()]


def _presets() -> Sequence[str]:
    from ycore.config.presets import presets

    return list(presets())


def _rewards() -> Sequence[str]:
    from ycore.rewards.builtin import BUILTIN, CODE

    return [*BUILTIN, CODE]


def _pages() -> Sequence[str]:
    pages = (page.name for page in files("ycore_docs").iterdir())
    return sorted(name.removesuffix(".md") for name in pages if name.endswith(".md"))


def _runs() -> Sequence[str]:
    return ["RUNS"]


def _benchmarks() -> Sequence[str]:
    import yaml

    return list(yaml.safe_load(files("ycore.config").joinpath("benchmarks.yaml").read_text()))


_VALUES: Mapping[str, Callable[[], Sequence[str]]] = {
    "recipe": _recipes,
    "preset": _presets,
    "form": lambda: ["merged", "gguf"],
    "benchmark": _benchmarks,
    **dict.fromkeys(("reward", "eval_reward", "constraint"), _rewards),
    "curriculum": lambda: ["off", "on"],
    "placement": lambda: ["dynamic", "colocated"],
    "accelerate": lambda: ["ddp", "zero1", "zero2", "zero3", "fsdp2"],
    "report_to": lambda: ["wandb", "trackio", "tensorboard"],
    **dict.fromkeys(("model", "replay", "teacher", "against"), _runs),
}
"""Values of options where neither a key's type nor TRL names them; RUNS are the run folders when Tab is pressed."""

_ARGUMENTS: Mapping[str, Callable[[], Sequence[str]]] = {
    **dict.fromkeys(("resume", "report", "chat", "serve", "export"), _runs),
    **dict.fromkeys(("recipes", "pipeline"), _recipes),
    "docs": _pages,
}

# -- the scripts -------------------------------------------------------------------------------------------------------


def _candidates(commands: Commands) -> str:
    """Return the function that bash and zsh share: it fills `candidates` for COMMAND PREVIOUS CURRENT."""
    names_of = defaultdict[tuple[str, ...], list[str]](list)
    options, arguments = [], []
    for command, (_, declared) in commands.items():
        for option in declared:
            if option.values:
                names_of[option.values].append(f'"{command} {option.name}"')
        options.append((f'"{command}"', [option.name for option in declared]))
        if command in _ARGUMENTS:
            arguments.append((command, _ARGUMENTS[command]()))
    arguments.append(('""', [name for name in commands if name]))
    values = [(" | ".join(names), words) for words, names in names_of.items()]
    return f"""\
# Completes the words of ycore. Written by `ycore --install-completion`; write it again after an upgrade.
_ycore_candidates() {{
    candidates=()
    case "$1 $2" in
{_cases(values)}
    *)
        [[ $3 != -* && $2 == -* ]] && return
        [[ $3 != -* ]] && case "$1" in
{_cases(arguments)}
        esac
        (( ${{#candidates[@]}} )) || case "$1" in
{_cases(options)}
        esac
        ;;
    esac
    [[ "${{candidates[*]}}" == *RUNS* ]] || return
    candidates=()
    local run
    while IFS= read -r run; do
        candidates+=("${{run%/run.json}}")
    done < <(find runs -mindepth 2 -maxdepth 2 -name run.json 2>/dev/null)
}}
"""


def _cases(cases: Iterable[tuple[str, Sequence[str]]]) -> str:
    return "\n".join(
        f"    {pattern}) candidates=({' '.join(map(shlex.quote, words))}) ;;"
        for pattern, words in cases
    )


_ENDS: Mapping[str, str] = {
    "bash": """\
_ycore() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command= candidate
    local candidates=()
    (( COMP_CWORD > 1 )) && command=${COMP_WORDS[1]}
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    _ycore_candidates "$command" "$previous" "$current"
    COMPREPLY=()
    for candidate in "${candidates[@]}"; do
        [[ $candidate == "$current"* ]] && COMPREPLY+=("$candidate")
    done
    [[ ${candidates[0]-} == runs/* ]] && compopt -o filenames
}
complete -o default -F _ycore ycore
""",
    "zsh": """\
_ycore() {
    local -a candidates
    local current=$words[CURRENT] previous=$words[CURRENT-1] command=
    (( CURRENT > 2 )) && command=$words[2]
    if [[ $current == --*=* ]]; then
        previous=${current%%=*} current=${current#*=}
        compset -P '*='
    fi
    _ycore_candidates "$command" "$previous" "$current"
    (( $#candidates )) && compadd -- "${candidates[@]}" || _files
}
typeset -f compdef >/dev/null || { autoload -Uz compinit && compinit }
compdef _ycore ycore
""",
}


def _fish(commands: Commands) -> str:
    """Return a line for each command and each of its options."""
    lines = [
        "# Completes the words of ycore. Written by `ycore --install-completion`; write it again after an upgrade.",
        "function __ycore_runs",
        "    find runs -mindepth 2 -maxdepth 2 -name run.json 2>/dev/null | string replace -r '/run.json$' ''",
        "end",
    ]
    for command, (summary, options) in commands.items():
        line = f"complete -c ycore -n '__fish_seen_subcommand_from {command}'"
        if command:
            lines.append(
                f"complete -c ycore -n __fish_use_subcommand -f -a {command} -d {_fish_quoted(summary)}"
            )
        else:
            line = "complete -c ycore -n __fish_use_subcommand"
        for option in options:
            name = (
                f"-l {option.name[2:]}" if option.name[:2] == "--" else f"-s {option.name[1:]}"
            )
            needs = " -r" if option.takes_value else ""
            values = f" -f -a {_fish_words(option.values)}" if option.values else ""
            lines.append(f"{line} {name}{needs}{values} -d {_fish_quoted(option.help)}")
        if command in _ARGUMENTS:
            lines.append(f"{line} -f -a {_fish_words(_ARGUMENTS[command]())}")
    return "\n".join(lines) + "\n"


def _fish_words(words: Sequence[str]) -> str:
    return _fish_quoted(" ".join(words).replace("RUNS", "(__ycore_runs)"))


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
