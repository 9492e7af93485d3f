"""A tiny MAGI-2 on the real host: its parallel state, its transformer, its sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pool import environment, process_group


def load_plugins() -> None:
    """Load plugins as vLLM-Omni's diffusion worker does, again if it has been done before in this process."""
    import vllm.plugins
    import vllm_omni.plugins

    vllm.plugins.plugins_loaded = vllm_omni.plugins.omni_plugins_loaded = False
    vllm_omni.plugins.load_omni_general_plugins()


@contextmanager
def parallel_state(
    rank: int, nproc: int, store: str, *, tp: int = 1, cfg: int = 1, ring: int = 1, backend: str = "gloo"
) -> Iterator[None]:
    """vLLM-Omni's own groups: tensor parallelism `tp` and so on, the rest of the ranks Ulysses."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.distributed import parallel_state as state

    ulysses = nproc // (tp * cfg * ring)
    with process_group(rank, nproc, store, backend, timeout=60), set_current_vllm_config(VllmConfig()):
        state.init_distributed_environment(world_size=nproc, rank=rank, local_rank=rank, backend=backend)
        state.initialize_model_parallel(
            cfg_parallel_size=cfg,
            sequence_parallel_size=ulysses * ring,
            ulysses_degree=ulysses,
            ring_degree=ring,
            tensor_parallel_size=tp,
            backend=backend,
        )
        try:
            yield
        finally:
            state.destroy_model_parallel()
            _forget_world(state)


def _forget_world(state: Any) -> None:
    import vllm.distributed.parallel_state as vllm_state

    state._WORLD = None
    vllm_state._WORLD = None


def tiny_config(dtype: torch.dtype = torch.float32, moe_heads: int = 4, heads: int = 4, top_k: int = 2) -> Any:
    """Three layers, the last two with MoE."""
    from vllm_omni.diffusion.models.magi2.configuration_magi2 import Magi2MHCConfig, Magi2MoEConfig, Magi2PreviewConfig

    hidden = 24 * heads
    return Magi2PreviewConfig(
        num_layers=3,
        hidden_size=hidden,
        head_dim=hidden // heads,
        num_query_groups=heads,
        video_in_channels=4,
        audio_in_channels=6,
        text_in_channels=10,
        multimodal_layers=(0,),
        params_dtype=dtype,
        mhc=Magi2MHCConfig(num_streams=2, sinkhorn_iterations=3),
        moe=Magi2MoEConfig(
            num_heads=moe_heads,
            num_experts=4,
            top_k=top_k,
            expert_intermediate_size=16,
            shared_expert_intermediate_size=16,
            modality_shared_expert_intermediate_size=16,
            layers=(1, 2),
        ),
    )


def checkpoint(config: Any) -> dict[str, torch.Tensor]:
    """Weights of the whole model, the same in every process. Call it outside of any parallel state."""
    from vllm_omni.diffusion.models.magi2.modeling_magi2 import Magi2PreviewTransformer

    generator = torch.Generator().manual_seed(7)
    model = Magi2PreviewTransformer(config)
    return {
        name: (torch.randn(value.shape, generator=generator) * 0.2).to(value.dtype)
        for name, value in model.state_dict().items()
    }


def transformer(config: Any, weights: dict[str, torch.Tensor]) -> Any:
    """The model, sharded as the current parallel state says."""
    from vllm_omni.diffusion.models.magi2.modeling_magi2 import Magi2PreviewTransformer

    model = Magi2PreviewTransformer(config)
    model.load_weights(weights.items())
    return model.eval()


@contextmanager
def plugin(exchange: str | None) -> Iterator[list[str]]:
    """The plugin on in this process with a given exchange, or off (None), for the time of the block.

    Yields the directions of the exchanges that go through it; filled for "counted" only, which is the
    reference behind a counter.
    """
    from vllm_musa_headpar import plugin as plugin_module
    from vllm_musa_headpar import register_head_parallel_exchange
    from vllm_musa_headpar.config import EXCHANGE, FLAG

    _calls.clear()
    if exchange is None:
        with environment(**{FLAG: "0"}):
            load_plugins()
            yield _calls
        return
    register_head_parallel_exchange("counted", counted, backends=())
    with environment(**{FLAG: "strict", EXCHANGE: exchange}):
        load_plugins()
        try:
            yield _calls
        finally:
            assert plugin_module.undo() == []


_calls: list[str] = []


def counted(exchange: Any, group: Any) -> Any:
    """The reference, with every call noted."""
    from vllm_musa_headpar.implementations.reference import all_to_all

    _calls.append(exchange.name)
    return all_to_all(exchange, group)


@dataclass(frozen=True)
class Trace:
    """What a denoising run computed: the transformer's output at every step, and the final latents."""

    outputs: list[torch.Tensor]
    video: torch.Tensor
    audio: torch.Tensor


def request(steps: int) -> Any:
    """A small request: 96 packed tokens in each forward with both guidance branches."""
    from vllm_omni.diffusion.models.magi2.sampler_magi2 import CFGConfig, SamplerInput, build_magi2_preview_schedulers

    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    video, audio = build_magi2_preview_schedulers(steps, device="cpu")
    return SamplerInput(
        video_t_list=list(video.timesteps),
        audio_t_list=list(audio.timesteps),
        latent=random(1, 4, 2, 4, 4),
        audio_latent=random(1, 8, 6),
        txt_feat=random(1, 8, 10),
        null_txt_feat=random(1, 8, 10),
        ref_audio_feat=None,
        ref_video_feat=None,
        video_scheduler=video,
        audio_scheduler=audio,
        cfg_config=CFGConfig(),
    )


def packed_input() -> tuple[Any, ...]:
    """The transformer's arguments for the request's first step."""
    from vllm_omni.diffusion.models.magi2.sampler_magi2 import Magi2PreviewSampler

    sampler, asked = Magi2PreviewSampler(torch.nn.Identity(), device="cpu"), request(1)
    step = sampler.prepare_model_input(
        asked.latent, asked.audio_latent, asked.txt_feat, asked.null_txt_feat, t=asked.video_t_list[0]
    )
    return sampler.data_proxy.process_input(step).model_args


def denoise(model: Any, steps: int = 2) -> Trace:
    """Run the host's sampler with both guidance branches."""
    from vllm_omni.diffusion.models.magi2.sampler_magi2 import Magi2PreviewSampler

    outputs: list[torch.Tensor] = []

    def observed(*arguments: Any) -> torch.Tensor:
        outputs.append(model(*arguments).clone())
        return outputs[-1]

    latents = Magi2PreviewSampler(observed, device="cpu").sample(request(steps))
    return Trace(outputs, *latents)


def run_model(
    rank: int, nproc: int, store: str, exchange: str | None, topology: Topology, prepare: Prepare = nullcontext
) -> tuple[Trace, list[str]]:
    """One denoising run in fresh groups with the plugin on or off, and the exchanges that it counted.

    `prepare(model)` is a context around the run.
    """
    config = tiny_config(topology.dtype, topology.moe_heads, topology.heads, topology.top_k)
    weights = checkpoint(config)
    groups = parallel_state(rank, nproc, f"{store}-{exchange}", tp=topology.tp, cfg=topology.cfg)
    with plugin(exchange) as calls, groups:
        model = transformer(config, weights)
        with prepare(model):
            trace = denoise(model, topology.steps)
        if exchange not in (None, "auto") and topology.ulysses > 1:
            from vllm_omni.diffusion.distributed.parallel_state import get_sp_group

            assert used_exchanges([get_sp_group().ulysses_group]) == {exchange}
        return trace, list(calls)


def used_exchanges(groups: Iterable[Any]) -> set[str]:
    """What those of these groups that have exchanged anything settled on."""
    from vllm_musa_headpar.agreement import first_use

    return {state.registration.name for group in groups for state in first_use.states.get(group, {}).values()}


@dataclass(frozen=True)
class Topology:
    """How many ranks share the model and how, and its heads."""

    nproc: int
    tp: int = 1
    cfg: int = 1
    heads: int = 4
    moe_heads: int = 4
    top_k: int = 2
    dtype: torch.dtype = torch.float32
    steps: int = 2

    @property
    def ulysses(self) -> int:
        return self.nproc // (self.tp * self.cfg)

    def expected_exchanges(self) -> list[str]:
        """Of one denoising run: the group's self-test; then three attention layers, two with MoE, local under TP."""
        if self.ulysses == 1:
            return []
        layer = self_test = ["dispatch", "return"]
        moe = [] if self.tp > 1 else layer
        return self_test + (layer + (layer + moe) * 2) * self.steps


Prepare = Callable[[Any], AbstractContextManager[Any]]
