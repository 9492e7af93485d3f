"""vLLM-Omni's own diffusion transformers, made tiny, with random weights and random inputs.

Sequence parallelism is applied as the host's model loader does it, blocks are compiled as its model runner does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import magi2
import torch

HEAD_DIM = 16
TEXT = 5  # text tokens
CHANNELS = 4
LAYERS = 1


@dataclass(frozen=True)
class Topology:
    """How a model's ranks share it."""

    nproc: int
    ring: int = 1
    cfg: int = 1
    tp: int = 1

    def __str__(self) -> str:
        ways = {"ulysses": self.ulysses, "ring": self.ring, "cfg": self.cfg, "tp": self.tp}
        return " x ".join(f"{way} {size}" for way, size in ways.items() if size > 1) or "one rank"

    @property
    def ulysses(self) -> int:
        return self.nproc // (self.ring * self.cfg * self.tp)


@dataclass(frozen=True)
class HostModel:
    """A transformer of the host.

    `build(config, heads)` makes it; `inputs(random, batch, grid)` its forward's arguments for `grid[0] * grid[1]`
    tokens; `dispatches` and `returns` are the exchanges of one forward in Ulysses. `pads` says whether the host pads
    tokens that its ranks do not share evenly.
    """

    build: Callable[[Any, int], torch.nn.Module]
    inputs: Callable[[Callable[..., torch.Tensor], int, tuple[int, int]], dict[str, Any]]
    dispatches: int
    returns: int
    pads: bool = True


def qwen_image(config: Any, heads: int) -> torch.nn.Module:
    from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        config,
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )


def qwen_image_inputs(random: Callable[..., torch.Tensor], batch: int, grid: tuple[int, int]) -> dict[str, Any]:
    return {
        "hidden_states": random(batch, grid[0] * grid[1], 4 * CHANNELS),
        "encoder_hidden_states": random(batch, TEXT, 32),
        "encoder_hidden_states_mask": torch.ones(batch, TEXT, dtype=torch.bool),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, *grid)]] * batch,
        "txt_seq_lens": [TEXT] * batch,
    }


def wan(config: Any, heads: int) -> torch.nn.Module:
    module = without_pipelines("vllm_omni.diffusion.models.wan2_2", "wan2_2_transformer")
    made: torch.nn.Module = module.WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=32,
        freq_dim=16,
        ffn_dim=64,
        num_layers=LAYERS,
    )
    return made


def without_pipelines(package: str, name: str) -> Any:
    """A module of a package whose own import loads pipelines too, with what they need for pictures and films."""
    if f"{package}.{name}" not in sys.modules:
        found = importlib.util.find_spec(package)
        assert found is not None
        bare = importlib.util.module_from_spec(found)
        with mock.patch.dict(sys.modules, {package: bare}):
            loaded = importlib.import_module(f"{package}.{name}")
        sys.modules[f"{package}.{name}"] = loaded
    return sys.modules[f"{package}.{name}"]


def wan_inputs(random: Callable[..., torch.Tensor], batch: int, grid: tuple[int, int]) -> dict[str, Any]:
    return {
        "hidden_states": random(batch, CHANNELS, 1, 2 * grid[0], 2 * grid[1]),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": random(batch, TEXT, 32),
    }


def hunyuan_video(config: Any, heads: int) -> torch.nn.Module:
    from vllm_omni.diffusion.models.hunyuan_video.hunyuan_video_15_transformer import (
        HunyuanVideo15Transformer3DModel,
    )

    return HunyuanVideo15Transformer3DModel(
        config,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        num_layers=LAYERS,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=32,
        rope_axes_dim=(4, 6, 6),
    )


def hunyuan_video_inputs(random: Callable[..., torch.Tensor], batch: int, grid: tuple[int, int]) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT, dtype=torch.int64)
    mask[-1, -1] = 0  # a padded text token, so that the joint attention has a mask
    return {
        "hidden_states": random(batch, CHANNELS, 1, *grid),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": random(batch, TEXT, 32),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": random(batch, 3, 32),
        "encoder_attention_mask_2": torch.ones(batch, 3, dtype=torch.int64),
        "image_embeds": torch.zeros(batch, 2, 32),
    }


def flux2(config: Any, heads: int) -> torch.nn.Module:
    from vllm_omni.diffusion.models.flux2.flux2_transformer import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=CHANNELS,
        num_layers=LAYERS,
        num_single_layers=LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        od_config=config,
    )


def flux2_inputs(random: Callable[..., torch.Tensor], batch: int, grid: tuple[int, int]) -> dict[str, Any]:
    return {
        "hidden_states": random(batch, grid[0] * grid[1], CHANNELS),
        "encoder_hidden_states": random(batch, TEXT, 32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": _positions(grid, 4),
        "txt_ids": torch.zeros(TEXT, 4),
        "guidance": torch.full((batch,), 3.0),
    }


def longcat_image(config: Any, heads: int) -> torch.nn.Module:
    from vllm_omni.diffusion.data import TransformerConfig
    from vllm_omni.diffusion.models.longcat_image.longcat_image_transformer import LongCatImageTransformer2DModel

    config.tf_model_config = TransformerConfig.from_dict(
        {
            "patch_size": 1,
            "in_channels": CHANNELS,
            "num_layers": LAYERS,
            "num_single_layers": LAYERS,
            "attention_head_dim": HEAD_DIM,
            "num_attention_heads": heads,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 6, 6],
        }
    )
    return LongCatImageTransformer2DModel(config)


def longcat_image_inputs(random: Callable[..., torch.Tensor], batch: int, grid: tuple[int, int]) -> dict[str, Any]:
    return {
        "hidden_states": random(batch, grid[0] * grid[1], CHANNELS),
        "encoder_hidden_states": random(batch, TEXT, 32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": _positions(grid, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


AUDIO_HEADS = 4  # its exchange is never padded, so they are not the video's


def ltx2(config: Any, heads: int) -> torch.nn.Module:
    from vllm_omni.diffusion.models.ltx2.ltx2_transformer import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=heads * HEAD_DIM,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=AUDIO_HEADS,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=AUDIO_HEADS * 8,
        num_layers=LAYERS,
        caption_channels=32,
    )


def ltx2_inputs(random: Callable[..., torch.Tensor], batch: int, grid: tuple[int, int]) -> dict[str, Any]:
    tokens = grid[0] * grid[1]
    return {
        "hidden_states": random(batch, tokens, CHANNELS),
        "audio_hidden_states": random(batch, 6, CHANNELS),
        "encoder_hidden_states": random(batch, TEXT, 32),
        "audio_encoder_hidden_states": random(batch, TEXT, 32),
        "timestep": torch.full((batch, tokens), 500.0),
        "audio_timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": torch.ones(batch, TEXT),
        "audio_encoder_attention_mask": torch.ones(batch, TEXT),
        "num_frames": 1,
        "height": grid[0],
        "width": grid[1],
        "audio_num_frames": 6,
    }


def _positions(grid: tuple[int, int], axes: int) -> torch.Tensor:
    """Position ids `[tokens, axes]` of an image: row and column on the axes 1 and 2."""
    ids = torch.zeros(*grid, axes)
    ids[..., 1] = torch.arange(grid[0])[:, None]
    ids[..., 2] = torch.arange(grid[1])[None, :]
    return ids.reshape(-1, axes)


MODELS = {
    "Qwen-Image": HostModel(qwen_image, qwen_image_inputs, 3 * LAYERS, LAYERS),
    "Wan 2.2": HostModel(wan, wan_inputs, 3 * LAYERS, LAYERS),
    "HunyuanVideo 1.5": HostModel(hunyuan_video, hunyuan_video_inputs, 3 * LAYERS, LAYERS),
    "FLUX.2": HostModel(flux2, flux2_inputs, 6 * LAYERS, 2 * LAYERS),
    "LongCat-Image": HostModel(longcat_image, longcat_image_inputs, 6 * LAYERS, 2 * LAYERS, pads=False),
    # Video self-attention, and video keys and values for the audio: that output is gathered, not exchanged.
    "LTX-2": HostModel(ltx2, ltx2_inputs, 5 * LAYERS, LAYERS, pads=False),
}


@contextmanager
def parallel_state(rank: int, store: str, topology: Topology, backend: str = "gloo") -> Iterator[None]:
    """The host's parallel state over fresh groups, and layers of plain torch, for the time of the block."""
    from host_platform import plain_platform

    ways = {"tp": topology.tp, "cfg": topology.cfg, "ring": topology.ring}
    with magi2.parallel_state(rank, topology.nproc, store, **ways, backend=backend), plain_platform():
        yield


def configured(topology: Topology, mode: str, dtype: torch.dtype) -> Any:
    """The host's config for a model that is shared like this; `mode` is the host's `ulysses_mode`."""
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

    parallel = DiffusionParallelConfig(
        ulysses_degree=topology.ulysses,
        ring_degree=topology.ring,
        cfg_parallel_size=topology.cfg,
        tensor_parallel_size=topology.tp,
        ulysses_mode=mode,
    )
    return OmniDiffusionConfig(dtype=dtype, parallel_config=parallel, num_gpus=topology.nproc)


@contextmanager
def transformer(
    model: HostModel,
    topology: Topology,
    heads: int,
    mode: str = "strict",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Iterator[torch.nn.Module]:
    """The model in the current parallel state, with weights that are the same on every rank, in the host's
    forward context.

    Where the host does not pad, the output is this rank's tokens: it gathers with a collective for equal counts,
    which Gloo refuses for others.
    """
    from vllm.config import get_current_vllm_config
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.registry import _apply_sequence_parallel_if_enabled

    config = configured(topology, mode, dtype)
    with (
        set_forward_context(get_current_vllm_config(), config),
        set_current_diffusion_config(config),
        torch.inference_mode(),
    ):
        made = model.build(config, heads).eval().to(dtype)
        randomise(made)
        if not model.pads:
            made._sp_plan = {place: plan for place, plan in made._sp_plan.items() if isinstance(plan, dict)}
        pipeline = torch.nn.Module()
        pipeline.transformer = made.to(device)
        _apply_sequence_parallel_if_enabled(pipeline, config)
        yield made


def randomise(module: torch.nn.Module) -> None:
    """Weights that are the same in every process, and large enough for attention to matter."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(module.named_parameters()):
        scale = 0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        value = torch.randn(parameter.shape, generator=generator) * scale
        parameter.copy_(value + 1 if "norm" in name and name.endswith("weight") and parameter.ndim == 1 else value)


def forward(made: torch.nn.Module, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """One denoising step's output; two tensors where a model makes sound too."""
    from vllm_omni.diffusion.forward_context import get_forward_context

    context = get_forward_context()
    context.sp_original_seq_len, context.sp_padding_size = None, 0  # the host has a context per request
    output = made(**arguments, return_dict=False)
    if isinstance(output, torch.Tensor):
        return [output]
    if hasattr(output, "sample"):
        return [output.sample]
    return list(output)


def inputs(model: HostModel, batch: int, grid: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A forward's arguments, the same on every rank of a guidance branch."""
    from vllm_omni.diffusion.distributed.parallel_state import get_classifier_free_guidance_rank

    generator = torch.Generator().manual_seed(get_classifier_free_guidance_rank())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    given = model.inputs(random, batch, grid)
    steps = {name: given[name].to(dtype) for name in given if name in ("timestep", "audio_timestep", "guidance")}
    return {**given, **steps}
