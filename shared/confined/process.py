"""The process that runs foreign code: grammars of clients, and chat templates of models.

It reads jobs from its standard input and answers each on its standard output. A job that needs more
than its share of processor time, memory or stack ends the process; so does the end of its input.
"""

import os
import resource
import signal
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from shared.chat_template import ChatTemplate
from shared.confined import jobs
from shared.confined.jobs import (
    Check,
    Compile,
    Done,
    Job,
    Learn,
    Outcome,
    Refused,
    Render,
    Template,
)
from shared.errors import BadInput, ModelError
from shared.stack import CHECK_STACK
from shared.template_manner import manner_of

CHECK_S = 0.5
"""Seconds of processor time for one grammar. A node takes about as long to make it, while others
wait."""
TEMPLATE_S = 0.25
"""Seconds of processor time for one prompt."""
COMPILE_S = 5.0
"""Seconds of processor time to read a template when its model is imported. Only the importer waits,
whose model must not be refused because a processor is slow."""
GRAMMAR_BYTES = 2 << 30
"""How much more memory than before a grammar may take."""
TEMPLATE_BYTES = 256 << 20
NICE = 10
"""How much the scheduler prefers those who serve where processors are short."""
MAX_TEMPLATES = 64
"""How many templates are kept ready."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    threading.stack_size(CHECK_STACK)
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()


def _serve() -> None:
    templates: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()
    while head := sys.stdin.buffer.read(jobs.HEAD_BYTES):
        job = jobs.decode_job(sys.stdin.buffer.read(jobs.body_bytes(head)))
        nbytes, seconds = _limits(job)
        _limit_memory(nbytes)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends us
        outcome = _outcome(job, templates)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sys.stdout.buffer.write(jobs.encode(outcome))
        sys.stdout.buffer.flush()


def _limits(job: Job) -> tuple[int, float]:
    """Bytes and seconds."""
    match job:
        case Check():
            return GRAMMAR_BYTES, CHECK_S
        case Compile():
            return TEMPLATE_BYTES, COMPILE_S
        case _:
            return TEMPLATE_BYTES, TEMPLATE_S


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


def _outcome(job: Job, templates: "OrderedDict[tuple[str, str], ChatTemplate]") -> Outcome:
    try:
        match job:
            case Check():
                # Whoever only renders templates need not load llguidance.
                from shared import grammar

                grammar.check(job.grammar)
                return Done("")
            case Compile():
                _ready(job.template, templates)
                return Done("")
            case Render():
                return _rendered(job, _ready(job.template, templates))
            case Learn():
                manner = manner_of(_ready(job.template, templates))
                return Done(msgspec.json.encode(manner).decode())
    except BadInput as error:
        return Refused(str(error))
    except ModelError as error:
        return Refused(str(error), by_template=True)
    except MemoryError:
        return Refused("takes too much memory")


def _ready(
    template: Template, templates: "OrderedDict[tuple[str, str], ChatTemplate]"
) -> ChatTemplate:
    key = template.source, repr(template.special_tokens)
    if key not in templates:
        templates[key] = ChatTemplate(template.source, template.special_tokens)
    templates.move_to_end(key)
    if len(templates) > MAX_TEMPLATES:
        templates.popitem(last=False)
    return templates[key]


def _rendered(job: Render, template: ChatTemplate) -> Outcome:
    text = template.render(
        job.messages,
        add_generation_prompt=job.add_generation_prompt,
        arguments=job.arguments,
        tools=job.tools,
    )
    if len(text) > job.most_chars:
        return Refused(
            f"the chat template makes a prompt of {len(text)} characters of the messages; "
            f"at most {job.most_chars} fit the model's context"
        )
    return Done(text)


if __name__ == "__main__":
    main()
