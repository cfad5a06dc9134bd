"""`lambdascale completion SHELL`: what a shell needs to complete commands and options."""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

HOW = {
    "bash": 'eval "$(lambdascale completion bash)"',
    "zsh": 'eval "$(lambdascale completion zsh)"',
    "fish": "lambdascale completion fish | source",
}
_BASH = """\
_lambdascale() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" at="" n
  for ((n = 1; n < COMP_CWORD; n++)); do
    case "${{COMP_WORDS[n]}}" in -*) ;; *) at="$at ${{COMP_WORDS[n]}}" ;; esac
  done
  local words=""
  while :; do
    case "$at" in
{cases}
      *) at="${{at% *}}"; continue ;;
    esac
    break
  done
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ "${{#COMPREPLY[@]}}" -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _lambdascale lambdascale
"""


def add_parser(commands: "argparse._SubParsersAction[Any]", whole: Callable[[], Any]) -> None:
    """`whole`: makes the parser of all commands."""
    parser = commands.add_parser(
        "completion",
        help="print what a shell needs to complete commands and options",
        description="Prints a script for the shell. In its startup file: "
        + "; ".join(f"{shell}: {how}" for shell, how in HOW.items()),
    )
    parser.add_argument("shell", choices=sorted(HOW), help="the shell that completes")
    parser.set_defaults(run=lambda args: run(args, whole()))


def run(args: argparse.Namespace, whole: argparse.ArgumentParser) -> int:
    sys.stdout.write(_fish(whole) if args.shell == "fish" else _bash(whole, args.shell))
    return 0


def words_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each command as it is typed, and what may follow it: its commands and options."""
    words: list[str] = []
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
        elif action.help != argparse.SUPPRESS:
            words += [option for option in action.option_strings if option.startswith("--")]
            words += [str(choice) for choice in action.choices or ()]
    yield path, [*below, *words]
    for name, each in below.items():
        yield from words_of(each, f"{path} {name}")


def _bash(whole: argparse.ArgumentParser, shell: str) -> str:
    cases = "\n".join(
        f'      "{path}") words="{" ".join(words)}" ;;' for path, words in words_of(whole)
    )
    begin = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return begin + _BASH.format(cases=cases)


def _fish(whole: argparse.ArgumentParser) -> str:
    lines = ["complete -c lambdascale -f"]
    for path, words in words_of(whole):
        names = path.split()
        condition = " and ".join(f"__fish_seen_subcommand_from {name}" for name in names)
        condition = condition or "__fish_use_subcommand"
        for word in words:
            said = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c lambdascale -n '{condition}' {said}")
    return "\n".join(lines) + "\n"
