"""A CLIP of a few random weights in a folder, as transformers' ``save_pretrained`` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LETTERS = "abcdefghijklmnopqrstuvwxyz."


def write_clip(folder: Path, width: int = 16, seed: int = 0, side: int = 32, **text: Any) -> Path:
    """Weights, configuration and tokenizer of a CLIP whose features have ``width`` numbers, from images of ``side``."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    last = len(tokens) - 1
    config = transformers.CLIPConfig(
        text_config={
            **sizes, "vocab_size": len(tokens), "max_position_embeddings": 40,
            "bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": last, **text,
        },
        vision_config={**sizes, "image_size": side, "patch_size": side // 2, "projection_dim": width},
        projection_dim=width,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.CLIPModel(config)
        for parameter in model.parameters():  # as they come, all texts look alike
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    return folder
