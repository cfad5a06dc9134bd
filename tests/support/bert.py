"""Makes checkpoints of encoders of texts (BERT) with random weights and a tokenizer of words."""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer
from transformers import BertConfig, BertModel

from services.local.demo_model import write_json

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSpec:
    layers: int = 4
    hidden: int = 64
    intermediate: int = 160
    heads: int = 4
    vocab_size: int = 400
    positions: int = 128
    pooling: str = "mean_tokens"
    """sentence-transformers' name of a mode; empty: there are no files of theirs."""
    normalized: bool = True
    seed: int = 0


TINY_BERT = BertSpec()
"""6 units, 0.9 MB in fp32."""


def random_bert(seed: int, **config: Any) -> BertModel:
    """With weights random enough that vectors differ."""
    torch.manual_seed(seed)
    model = BertModel(BertConfig(**config)).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
        elif parameter.dim() == 1:
            parameter.normal_(mean=1.0, std=0.1)
        elif "embeddings" in name:
            parameter.normal_()
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def make_bert(path: Path, spec: BertSpec = TINY_BERT) -> None:
    """Writes what sentence-transformers saves: config, weights, tokenizer, and how vectors are
    made, into the directory `path`."""
    model = random_bert(
        spec.seed,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.positions,
    )
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(_tokenizer(spec).to_str())
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "model_max_length": spec.positions,
            **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
        },
    )
    if not spec.pooling:
        return
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    (path / "1_Pooling").mkdir()
    write_json(
        path / "1_Pooling" / "config.json",
        {"word_embedding_dimension": spec.hidden}
        | {f"pooling_mode_{mode}": mode == spec.pooling for mode in modes},
    )
    kinds = ["Transformer", "Pooling", *["Normalize"] * spec.normalized]
    modules: Any = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(path / "modules.json", modules)


def _tokenizer(spec: BertSpec) -> Tokenizer:
    """As sentence-transformers saves it: it cuts and pads by itself, which a server must not do."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(
        vocab_size=spec.vocab_size, show_progress=False, special_tokens=list(SPECIAL)
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.enable_truncation(spec.positions // 4)
    tokenizer.enable_padding(length=spec.positions // 4)
    return tokenizer
