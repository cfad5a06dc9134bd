"""Foreign clients and test suites, each at a fixed version and unmodified.

In commands, {bin} is the folder of the suite's programs, {url} the gateway's URL, {model} the
model's name, {checkpoint} its folder, {here} this folder and {out} an empty folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass

COMPLY = "{bin}/llm-comply --api-key any --model {model} --timeout 120"


@dataclass(frozen=True, slots=True)
class Suite:
    about: str
    packages: tuple[str, ...]
    """Of Python's index; none for a program that `npx` fetches."""
    command: str
    lessons: str = ""
    """A file in this folder: what the model is taught by heart (teaching.py). Empty: nothing, so
    its answers mean nothing."""


SUITES: Mapping[str, Suite] = {
    "openai-2": Suite(
        "OpenAI's client, version 2, with checks of our own",
        ("openai==2.54.0",),
        "{bin}/python {here}/openai_checks.py {url}/v1 {model}",
    ),
    "openai-3": Suite(
        "OpenAI's client, version 3, with the same checks",
        ("openai==3.52.0",),
        "{bin}/python {here}/openai_checks.py {url}/v1 {model}",
    ),
    "langchain": Suite(
        "LangChain's own tests of chat models, on ChatOpenAI",
        (
            "langchain-openai==1.7.3",
            "langchain-tests==1.1.9",
            "langchain==1.4.7",
            "pytest-asyncio==1.5.0",
        ),
        "{bin}/python -m pytest -q -rs -p no:cacheprovider -c {here}/langchain/pytest.ini "
        "{here}/langchain/test_chat_model.py --url {url}/v1 --model {model}",
        lessons="langchain/lessons.json",
    ),
    "litellm": Suite(
        "litellm, with checks of our own",
        ("litellm==1.106.2", "mcp==2.3.0"),
        "{bin}/python {here}/litellm_checks.py {url}/v1 {model}",
        lessons="langchain/lessons.json",
    ),
    "llm-comply-chat": Suite(
        "shapes of chats",
        ("llm-comply==0.5.0",),
        f"{COMPLY} --base-url {{url}}/v1 --format openai-chat",
        lessons="shapes.json",
    ),
    "llm-comply-responses": Suite(
        "shapes of responses",
        ("llm-comply==0.5.0",),
        f"{COMPLY} --base-url {{url}}/v1 --format open-responses",
        lessons="shapes.json",
    ),
    "llm-comply-messages": Suite(
        "shapes of messages",
        ("llm-comply==0.5.0",),
        f"{COMPLY} --base-url {{url}}/v1 --format anthropic",
        lessons="shapes.json",
    ),
    "compatcanary": Suite(
        "compatibility with OpenAI's API",
        (),
        "npx --yes compatcanary@0.2.2 scan --base-url {url}/v1 --model {model} --profile modern",
        lessons="shapes.json",
    ),
    "guidellm": Suite(
        "load: guidellm",
        ("guidellm==0.8.1",),
        "{bin}/guidellm run --backend kind=openai_http,target={url},model={model} "
        "--profile kind=concurrent,streams=4 --constraint kind=max_requests,count=40 "
        "--data kind=synthetic_text,prompt_tokens=64,output_tokens=32 "
        "--tokenizer kind=hf_auto,model={checkpoint} --output kind=console --disable-progress",
    ),
    "aiperf": Suite(
        "load: aiperf",
        ("aiperf==0.13.0",),
        "{bin}/aiperf profile --url {url} --model {model} --tokenizer {checkpoint} "
        "--endpoint-type chat --streaming --concurrency 4 --request-count 40 "
        "--synthetic-input-tokens-mean 64 --output-tokens-mean 32 --output-artifact-dir {out} "
        "--ui-type none",
    ),
    "lm-eval": Suite(
        "evaluation: lm-evaluation-harness, with tasks of ours that need no download",
        ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
        "sh -c 'cd {here}/tasks && exec {bin}/lm_eval --model local-completions --include_path . "
        "--tasks lambdascale_choice,lambdascale_answer --model_args "
        "model={model},base_url={url}/v1/completions,tokenizer={checkpoint},num_concurrent=4'",
    ),
}
