"""Tab completion as a script of the shell's own, so that a Tab starts no Python.

It holds the commands, their options and the values of these as they are when it is written.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from ycore_cli.options import KEYS

from ycore.config.algorithms import ALGORITHMS, families, find_entry
from ycore.config.trl_fields import fields_of
from ycore.errors import ConfigError


def install_completion_script(group: Any) -> str:
    """Write the script for the user's shell, and the line that reads it into the shell's own file; say where."""
    shell = _users_shell()
    folder = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
    file = folder / (
        "fish/completions/ycore.fish" if shell == "fish" else f"ycore/completion.{shell}"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(completion_script(group), encoding="utf-8")
    reader = ""
    if shell != "fish":  # fish reads that folder by itself
        home = os.environ.get("ZDOTDIR", Path.home()) if shell == "zsh" else Path.home()
        start_up = Path(home) / f".{shell}rc"
        line = f"source {shlex.quote(str(file))}\n"
        if not start_up.exists() or line not in start_up.read_text(encoding="utf-8"):
            with start_up.open("a", encoding="utf-8") as end:
                end.write(f"\n{line}")
        reader = f", which {start_up} reads"
    return f"wrote {file}{reader}; begin a new shell, and say it again after an upgrade"


def completion_script(group: Any) -> str:
    """Return the script for the user's shell: its program, with a case of rows for each command."""
    shell = _users_shell()
    values = _values()
    commands = group.commands.items()
    rows = {name: list(_rows(name, command, values)) for name, command in commands}
    rows[""] = [
        *(f"{name}||{command.get_short_help_str(80)}" for name, command in commands),
        *_rows("", group, values),
    ]
    case = _FISH_CASE if shell == "fish" else _CASE
    cases = "\n".join(
        case.format(command=shlex.quote(name), rows=" ".join(map(shlex.quote, words)))
        for name, words in rows.items()
    )
    return _PROGRAMS[shell].replace("CASES", cases)


def _users_shell() -> str:
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in _PROGRAMS:
        raise ConfigError(
            f"completion is for bash, zsh and fish; SHELL is {shell!r}; say e.g. SHELL=bash ycore --install-completion"
        )
    return shell


def _rows(name: str, command: Any, values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield `WORD|VALUES|HELP` for each word that a command takes, and for TRL's options, which it does not declare."""
    is_entry = name in ALGORITHMS or name in families() or name == "eval"
    entry = find_entry(name if is_entry else "grpo")
    fields = fields_of(entry.trl_config) if entry.trl_config else {}
    choices = {key: field.choices for key, field in fields.items()}
    declared = {"--help"}
    yield "--help||Show the help."
    for parameter in command.params:
        key = KEYS.get(parameter.name, parameter.name)
        words = values.get(parameter.name) or choices.get(key) or _literals(entry.config, key)
        if parameter.param_type_name == "argument":
            yield from (f"{word}||" for word in words)
        else:
            text = f"{' '.join(words)}|{parameter.help}"
            names = {*parameter.opts, *parameter.secondary_opts}
            declared |= names
            yield from (f"{option}|{text}" for option in sorted(names))
    if name in ALGORITHMS:
        for field in fields.values():
            if field.option not in declared:
                yield f"{field.option}|{' '.join(field.choices)}|of TRL"


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


def _values() -> dict[str, Sequence[str]]:
    """List the values of parameters that neither a key's type nor TRL lists; RUNS are the run folders at a Tab."""
    import yaml

    from ycore.config.presets import presets
    from ycore.config.recipe_files import list_recipes
    from ycore.rewards.builtin import BUILTIN, CODE

    recipes = tuple(entry.name for entry in list_recipes())
    benchmarks = files("ycore.config").joinpath("benchmarks.yaml").read_text()
    pages = (page.name for page in files("ycore_docs").iterdir())
    return {
        "form": ("merged", "gguf"),
        "curriculum": ("off", "on"),
        "placement": ("dynamic", "colocated"),
        "accelerate": ("ddp", "zero1", "zero2", "zero3", "fsdp2"),
        "report_to": ("wandb", "trackio", "tensorboard"),
        "preset": list(presets()),
        "benchmark": list(yaml.safe_load(benchmarks)),
        "words": sorted(name.removesuffix(".md") for name in pages if name.endswith(".md")),
        **dict.fromkeys(("recipe", "file"), recipes),
        **dict.fromkeys(("reward", "eval_reward", "constraint"), (*BUILTIN, CODE)),
        **dict.fromkeys(("run", "runs", "model", "replay", "teacher"), ("RUNS",)),
    }


_CASE = "    {command}) rows=({rows}) ;;"
_CANDIDATES = """\
# Completes the words of ycore. Written by `ycore --install-completion`; write it again after an upgrade.
_ycore_candidates() {  # fills `candidates` for COMMAND PREVIOUS CURRENT
    [[ -n ${ZSH_VERSION-} ]] && setopt localoptions shwordsplit
    local row name values
    local -a rows arguments flags
    case "$1" in
CASES
    esac
    for row in "${rows[@]}"; do
        name=${row%%|*} values=${row#*|}
        values=${values%%|*}
        if [[ $name == "$2" && -n $values ]]; then
            arguments=($values)
            break
        elif [[ $name == -* ]]; then
            flags+=("$name")
        elif [[ $2 != -* ]]; then
            arguments+=("$name")
        fi
    done
    if [[ $3 != -* ]] && { [[ $2 == -* ]] || (( ${#arguments[@]} )); }; then
        candidates=("${arguments[@]}")
    else
        candidates=("${flags[@]}")
    fi
    [[ "${candidates[*]}" == *RUNS* ]] || return
    candidates=()
    while IFS= read -r name; do
        candidates+=("${name%/run.json}")
    done < <(find runs -mindepth 2 -maxdepth 2 -name run.json 2>/dev/null)
}
"""
_FISH_CASE = "    case {command}\n        set rows {rows}"
_PROGRAMS: Mapping[str, str] = {
    "bash": _CANDIDATES
    + """\
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
    "zsh": _CANDIDATES
    + """\
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
    "fish": """\
# Completes the words of ycore. Written by `ycore --install-completion`; write it again after an upgrade.
function __ycore_candidates
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l previous $before[-1]
    set -l prefix ''
    if string match -q -- '--*=*' "$current"
        set previous (string replace -r '=.*' '' -- $current)
        set prefix "$previous="
        set current (string replace "$prefix" '' -- $current)
    end
    set -l rows
    set -l flags
    set -l arguments
    switch "$before[2]"
CASES
    end
    for row in $rows
        set -l field (string split -m 2 '|' -- $row)
        if test "$field[1]" = "$previous"; and test -n "$field[2]"
            set arguments $prefix(string split ' ' -- $field[2])
            break
        else if string match -q -- '-*' $field[1]
            set -a flags $field[1]\\t$field[3]
        else if not string match -q -- '-*' $previous
            set -a arguments $field[1]\\t$field[3]
        end
    end
    if string match -q -- '-*' "$current"
        set arguments $flags
    else if not string match -q -- '-*' $previous; and not set -q arguments[1]
        set arguments $flags
    end
    if string match -q -- '*RUNS*' $arguments
        set arguments (find runs -mindepth 2 -maxdepth 2 -name run.json 2>/dev/null)
        set arguments $prefix(string replace -r '/run.json$' '' -- $arguments)
    end
    if set -q arguments[1]
        printf '%s\\n' $arguments
    else
        printf '%s\\n' $prefix(__fish_complete_path "$current")
    end
end
complete -c ycore -f -a '(__ycore_candidates)'
""",
}
"""The program of each shell, in which CASES are the rows of its commands."""
