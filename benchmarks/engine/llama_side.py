"""llama.cpp, as the benchmark of the engine measures it.

    PYTHON llama_side.py CHECKPOINT GGUF KIND THREADS SEQUENCES LENGTH

A script for a Python of its own, which has llama-cpp-python and gguf, and nothing of this project.
It writes the checkpoint (a Llama's) to the file GGUF, with weights of KIND (F32, BF16, Q8_0), and
says "ready". Then it answers each line {"prompts": [[..]], "tokens": n} with {"first_s": ..,
"step_s": .., "made": [[..]]}: seconds until all have their first token, median seconds of the
decode steps after it, and the tokens, which are the most probable. KV is float16, the default of
llama.cpp.
"""

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

gguf: Any = import_module("gguf")
llama: Any = import_module("llama_cpp")

Array = npt.NDArray[np.float32]
STEP_TOKENS = 512
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FILE_TYPES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}


def tensors(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """The checkpoint's tensors in float32."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, spec in header.items():
            first, last = spec["data_offsets"]
            piece = memoryview(data)[start + first : start + last]
            if spec["dtype"] == "BF16":
                wide = np.frombuffer(piece, np.uint16).astype(np.uint32) << 16
                values = wide.view(np.float32)
            else:
                values = np.frombuffer(piece, np.float32)
            yield name, values.reshape(spec["shape"])


def neighbours(weight: Array, heads: int) -> Array:
    """Rotated pairs next to each other, as GGUF has them; in a checkpoint they are half a head
    apart."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(checkpoint: Path, path: Path, kind: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    for name, values in tensors(checkpoint):
        if name not in WHOLE:
            _, _, layer, *inner, _ = name.split(".")
            if inner[-1] == "q_proj":
                values = neighbours(values, heads)
            elif inner[-1] == "k_proj":
                values = neighbours(values, kv_heads)
            name = f"blk.{layer}.{OF_LAYER['.'.join(inner)]}.weight"
        else:
            name = WHOLE[name]
        held = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        data = np.ascontiguousarray(values)
        writer.add_tensor(name, gguf.quants.quantize(data, held), raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Side:
    def __init__(self, path: Path, threads: int, sequences: int, length: int) -> None:
        """`length`: the most positions of a sequence."""
        self._quiet = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        given = llama.llama_context_default_params()
        given.n_ctx, given.n_seq_max, given.kv_unified = sequences * length, sequences, True
        given.n_batch = given.n_ubatch = STEP_TOKENS
        given.n_threads = given.n_threads_batch = threads
        self._context = llama.llama_init_from_model(model, given)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(STEP_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, object]:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        began = time.perf_counter()
        made = [[self._prefill(number, prompt)] for number, prompt in enumerate(prompts)]
        first_s, steps = time.perf_counter() - began, []
        for done in range(tokens - 1):
            began = time.perf_counter()
            rows = [
                (own[-1], len(prompt) + done, number, True)
                for number, (own, prompt) in enumerate(zip(made, prompts, strict=True))
            ]
            for own, token in zip(made, self._run(rows), strict=True):
                own.append(token)
            steps.append(time.perf_counter() - began)
        step_s = statistics.median(steps) if steps else 0.0
        return {"first_s": first_s, "step_s": step_s, "made": made}

    def _prefill(self, number: int, prompt: list[int]) -> int:
        found: list[int] = []
        for start in range(0, len(prompt), STEP_TOKENS):
            some = enumerate(prompt[start : start + STEP_TOKENS], start)
            found = self._run([(t, at, number, at + 1 == len(prompt)) for at, t in some])
        return found[0]

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """[(token, position, sequence, whether a token is drawn)] -> the tokens drawn."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, drawn) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, drawn
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        if llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._best(i) for i, (_, _, _, drawn) in enumerate(rows) if drawn]

    def _best(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def main() -> None:
    checkpoint, path, kind, threads, sequences, length = sys.argv[1:]
    write_gguf(Path(checkpoint), Path(path), kind)
    side = Side(Path(path), int(threads), int(sequences), int(length))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(side.generate(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
