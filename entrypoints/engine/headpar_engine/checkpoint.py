"""A Qwen-Image checkpoint with random weights, small enough to run on a CPU: `python -m headpar_engine.checkpoint`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

HEAD_DIM = 16
LAYERS = 2
LATENT_CHANNELS = 4
TEXT_WIDTH = 32

PARTS = {
    "transformer": ("diffusers", "QwenImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLQwenImage"),
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
}


def make(folder: Path, heads: int) -> None:
    """Write the checkpoint, unless it is there; what is there is whole, whoever else writes it at the same time.

    Args:
        folder: where it goes.
        heads: attention heads of each of the transformer's two layers.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as unfinished:
        whole = Path(unfinished) / "checkpoint"
        _write(whole, heads)
        try:
            os.rename(whole, folder)
        except OSError:
            if not folder.exists():
                raise


def _write(folder: Path, heads: int) -> None:
    import torch
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

    torch.manual_seed(0)
    QwenImageTransformer2DModel(
        num_layers=LAYERS,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        axes_dims_rope=(4, 6, 6),  # frame, height and width: HEAD_DIM together
        patch_size=2,
        in_channels=LATENT_CHANNELS * 4,  # a patch of 2 x 2
        out_channels=LATENT_CHANNELS,
        joint_attention_dim=TEXT_WIDTH,
    ).save_pretrained(folder / "transformer")
    AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    ).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    _write_text_encoder(folder)
    index = {"_class_name": "QwenImagePipeline", "_diffusers_version": "0.36.0", **PARTS}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_text_encoder(folder: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*bytes_to_unicode().values(), *special]  # one token per byte
    Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        unk_token=special[0],
        pad_token=special[0],
        extra_special_tokens=special[1:],
    ).save_pretrained(folder / "tokenizer")
    text = {
        "vocab_size": len(tokens),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "bos_token_id": tokens.index("<|endoftext|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    pictures = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=pictures)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "text_encoder")


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
