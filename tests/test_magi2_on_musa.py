"""MAGI-2 on a MUSA platform of the released host, which refuses it there: simulated, no card has run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import magi2
import pytest
import torch
from musa_device import SIMULATED
from pool import RankPool, environment
from stand_in import MAGI2, changed, fresh_plugin, modified_magi2, snapshot

pytestmark = [
    pytest.mark.musa,
    pytest.mark.skipif(not SIMULATED, reason="a host on a real card has its own platform and kernels"),
]

RECORDS = ("magi2.musa_device", "magi2.musa_attention", "magi2.musa_moe")
ATTRIBUTES = {
    (f"{MAGI2}.pipeline_magi2", "current_omni_platform"),
    (f"{MAGI2}.attention", "packed_attention_with_sink"),
    (f"{MAGI2}.mh_moe", "triton_mh_moe_forward"),
}


@contextmanager
def musa_platform() -> Iterator[Any]:
    """vLLM-Omni as it is where its platform is MUSA; the built-in one needs the vendor's package."""
    from host_platform import current_platform
    from vllm_omni.diffusion.models.magi2 import pipeline_magi2
    from vllm_omni.platforms.interface import OmniPlatformEnum, UnspecifiedOmniPlatform

    class Musa(UnspecifiedOmniPlatform):  # type: ignore[misc]
        _omni_enum = OmniPlatformEnum.MUSA

        def is_available(self) -> bool:
            return True

    platform = Musa()
    with current_platform(platform), mock.patch.object(pipeline_magi2, "current_omni_platform", platform):
        yield platform


@contextmanager
def switched_on(flag: str = "strict") -> Iterator[list[tuple[str, str]]]:
    from vllm_musa_headpar import plugin

    with environment(VLLM_MUSA_HEADPAR=flag), fresh_plugin() as log:
        plugin.register()
        yield log


def statuses() -> dict[str, tuple[str, str]]:
    from vllm_musa_headpar import report

    return {record.name: (record.status, record.reason) for record in report() if record.name in RECORDS}


def test_the_records_apply_where_the_host_refuses_musa_and_nowhere_else(ranks: RankPool, tmp_path: Path) -> None:
    ranks(where_they_apply, 1, tmp_path)


def where_they_apply(rank: int, nproc: int, store: str, root: Path) -> None:
    from vllm_omni.diffusion.models.magi2 import attention, mh_moe, pipeline_magi2

    modules = (pipeline_magi2, attention, mh_moe)
    with musa_platform():
        before = snapshot(*modules)
        with switched_on():
            assert statuses() == dict.fromkeys(RECORDS, ("applied", ""))
            assert changed(before, *modules) >= ATTRIBUTES
        assert changed(before, *modules) == set()

    with switched_on():
        assert statuses() == dict.fromkeys(RECORDS, ("not needed", "the platform is not MUSA"))

    source = Path(pipeline_magi2.__file__).read_text()
    supported = source.replace("requires CUDA GPUs", "requires CUDA or MUSA GPUs")
    assert supported != source
    with modified_magi2(root / "supported", {"pipeline_magi2.py": supported}), musa_platform(), switched_on("1"):
        assert {status for status, _ in statuses().values()} == {"not needed"}

    drifted = Path(attention.__file__).read_text().replace("scale = q.shape[-1] ** -0.5", "scale = 1.0")
    with modified_magi2(root / "drifted", {"attention.py": drifted}), musa_platform(), switched_on("1") as log:
        told = statuses()
        assert [told[name][0] for name in RECORDS] == ["applied", "refused", "applied"]
        assert "its body has changed" in told["magi2.musa_attention"][1]
        assert sum("magi2.musa_attention" in line for level, line in log if level == "WARNING") == 1


def test_the_pipeline_is_constructed_past_its_refusal(musa_ranks: RankPool, tmp_path: Path) -> None:
    musa_ranks(construct, 1, str(tmp_path))


def construct(rank: int, nproc: int, store: str, folder: str) -> None:
    """All that needs no checkpoint is the pipeline's own: its checks, its transformer, its staging."""
    from vllm_omni.diffusion.models.lance import wan_vae
    from vllm_omni.diffusion.models.magi2 import pipeline_magi2

    from vllm_musa_headpar.testing import musa

    musa.install()
    config = magi2.tiny_config(torch.bfloat16)
    od_config = SimpleNamespace(
        model=folder,
        revision=None,
        dtype=torch.bfloat16,
        parallel_config=SimpleNamespace(vae_patch_parallel_size=1),
        quantization_config=None,
        custom_pipeline_args=None,
        additional_config=None,
        enable_layerwise_offload=False,
        enable_distributed_layerwise_offload=False,
        pin_cpu_memory=False,
    )
    parts = {
        (pipeline_magi2, "Magi2Qwen35TextEncoder"),
        (pipeline_magi2, "Magi2AudioDecoder"),
        (pipeline_magi2, "Magi2TurboVAEDecoder"),
        (wan_vae, "LanceWanVAE"),
    }
    with ExitStack() as stack:
        for module, name in parts:
            stack.enter_context(mock.patch.object(module, name, torch.nn.Identity))
        stack.enter_context(mock.patch.object(pipeline_magi2, "_validate_native_topology"))
        stack.enter_context(mock.patch.object(pipeline_magi2, "MAGI2_PREVIEW_CONFIG", config))
        stack.enter_context(mock.patch.object(pipeline_magi2, "_resolve_checkpoint_root", return_value=folder))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", return_value=0))
        stack.enter_context(musa_platform())
        with pytest.raises(RuntimeError, match="requires CUDA GPUs"):
            pipeline_magi2.Magi2Pipeline(od_config)
        with switched_on():
            pipeline = pipeline_magi2.Magi2Pipeline(od_config)
            assert sum(parameter.numel() for parameter in pipeline.transformer.parameters()) > 0
            seen = pipeline_magi2.current_omni_platform
            assert (seen.is_cuda(), seen.is_musa(), seen.is_npu()) == (True, True, False)
            assert seen.get_device_count() == pipeline_magi2.current_omni_platform.get_device_count()
        with pytest.raises(RuntimeError, match="requires CUDA GPUs"):
            pipeline_magi2.Magi2Pipeline(od_config)


# (query tokens, key tokens) of each packed sequence; query heads, key heads; dim; sinks; soft cap; bytes of scores
ATTENTION = [
    ([(7, 7)], 3, 3, 8, 0, -1.0, 200),
    ([(5, 9), (0, 4), (12, 3)], 4, 2, 8, 2, 5.0, 500),
    ([(40, 33), (1, 60)], 6, 2, 16, 1, -1.0, 4096),
    ([(9, 9)], 2, 1, 4, 3, 2.0, 1),  # not even one query fits: one at a time
    ([(30, 30), (30, 30)], 2, 2, 8, 1, 30.0, 2**30),  # all fit
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_slices_is_the_reference(musa_ranks: RankPool, dtype: torch.dtype) -> None:
    """Equal within 1e-6 in float32 (sums of another order), within one rounding of the result in bfloat16."""
    musa_ranks(sliced_attention, 1, dtype)


def sliced_attention(rank: int, nproc: int, store: str, dtype: torch.dtype) -> None:
    from vllm_omni.diffusion.models.magi2 import attention

    from vllm_musa_headpar.host.magi2_on_musa import make_packed_attention
    from vllm_musa_headpar.testing import musa

    musa.install()
    reference = attention.torch_varlen_attention_with_sink
    largest: list[int] = []

    def observed(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        sinks = 0 if rest["sink"] is None else rest["sink"].shape[0]
        largest.append((q.shape[0], 4 * q.shape[1] * q.shape[0] * (k.shape[0] + sinks)))
        return reference(q, k, v, **rest)

    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("the stock function is for other devices")

    for sequences, heads, kv_heads, dim, sinks, softcap, bound in ATTENTION:
        generator = torch.Generator().manual_seed(heads)
        queries, keys = (torch.tensor([0, *sizes]).cumsum(0) for sizes in zip(*sequences, strict=True))
        q = torch.randn(int(queries[-1]), heads, dim, generator=generator).to(dtype)
        k, v = (torch.randn(int(keys[-1]), kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
        sink = torch.randn(sinks, heads, generator=generator) if sinks else None
        expected = reference(q, k, v, cu_seqlens_q=queries, cu_seqlens_k=keys, softcap=softcap, sink=sink)
        varlen = attention.VarlenHandler(queries.to("musa"), keys.to("musa"))
        largest.clear()
        with mock.patch.object(attention, "torch_varlen_attention_with_sink", observed):
            sliced = make_packed_attention(never, attention, bound)
            on_device = [tensor.to("musa") for tensor in (q, k, v)]
            found = sliced(*on_device, varlen, softcap=softcap, sink=None if sink is None else sink.to("musa"))
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
        torch.testing.assert_close(found.cpu(), expected, **tolerance)
        assert all(rows == 1 or scores <= bound for rows, scores in largest), (largest, bound)
        if bound == 2**30:
            assert len(largest) == len(sequences)
    with pytest.raises(ValueError, match=r"shaped \[tokens,heads,dim\]"):
        sliced(on_device[0][0], *on_device[1:], varlen)
    seen: list[Any] = []
    on_cpu = make_packed_attention(lambda *given, **more: seen.append((given, more)) or q, attention)
    assert on_cpu(q, k, v, varlen, softcap=3.0, sink=None) is q
    assert seen == [((q, k, v, varlen), {"softcap": 3.0, "sink": None})]


class Kernel:
    """Stands where the host's Triton kernel is: computes as its reference does, and keeps its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[torch.dtype, bool]] = []

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, num_stages: int, num_warps: int) -> None:
        from vllm_omni.diffusion.models.magi2 import mh_moe

        x, w_gate, w_up, w_down, output, gather_ids, probs, offsets = arguments[:8]
        deterministic, experts = arguments[-1], w_gate.shape[0]
        self.launches.append((x.dtype, deterministic))
        assert output.shape == ((gather_ids.numel(), 1, x.shape[2]) if deterministic else x.shape)
        ends = offsets.tolist()
        for expert in range(experts):
            begin, end = ends[expert], ends[expert + 1]
            tokens, head = gather_ids[begin:end].long(), expert // (experts // x.shape[1])
            rows = x[tokens, head]
            hidden = mh_moe.swiglu7_pair(rows @ w_gate[expert], rows @ w_up[expert])
            routed = hidden @ w_down[expert] * probs[begin:end, None].to(x.dtype)
            if deterministic:
                output[begin:end, 0] = routed
            else:
                output[:, head].index_add_(0, tokens, routed)


def test_a_forward_whose_tensors_claim_to_be_cuda(musa_ranks: RankPool) -> None:
    musa_ranks(forward, 1)


def forward(rank: int, nproc: int, store: str) -> None:
    from vllm_omni.diffusion.models.magi2 import attention, mh_moe

    from vllm_musa_headpar.testing import musa

    musa.install()
    config = magi2.tiny_config(torch.bfloat16)
    moe = dataclasses.replace(config.moe, expert_intermediate_size=32)
    config = dataclasses.replace(config, hidden_size=256, head_dim=64, moe=moe)  # what the kernel's blocks divide
    model, arguments = magi2.transformer(config, magi2.checkpoint(config)), magi2.packed_input()
    kernel = Kernel()

    def bundled(*given: Any, **more: Any) -> Any:
        raise AssertionError("a MUSA tensor reached the CUDA kernel")

    patches = (
        mock.patch.object(musa.MusaTensor, "is_cuda", property(lambda self: True)),
        mock.patch.object(attention, "vllm_flash_attn_varlen_with_lse", bundled),
        mock.patch.object(attention, "_resolve_flash_attn_version", return_value=2),
        mock.patch.object(mh_moe, "_mh_moe_kernel", kernel),
        mock.patch.object(mh_moe.tl, "float32", torch.float32, create=True),  # without Triton there is none
    )
    with ExitStack() as stack, torch.inference_mode(), musa_platform():
        expected = model(*arguments)
        for patch in patches:
            stack.enter_context(patch)
        on_device = [value.to("musa") if isinstance(value, torch.Tensor) else value for value in arguments]
        with pytest.raises(AssertionError, match="reached the CUDA kernel"):
            model.to("musa")(*on_device)
        with switched_on():
            found = model(*on_device).cpu()
            assert kernel.launches == [(torch.bfloat16, True)] * 2, "two MoE layers"
            half = torch.zeros(3, 4, 64, device="musa", dtype=torch.float32)
            routes = torch.zeros(3, dtype=torch.int32, device="musa"), torch.ones(3, device="musa")
            offsets = torch.tensor([0, 3, 3, 3, 3], device="musa")
            weights = [torch.zeros(4, 64, 64, device="musa") for _ in range(3)]
            for deterministic in (False, True):
                mh_moe.triton_mh_moe_forward(half, *routes, offsets, *weights, deterministic=deterministic)
            assert kernel.launches[2:] == [(torch.float32, False), (torch.float32, True)]
    assert torch.equal(found, expected)


def test_the_doctor_says_whether_magi2_starts(ranks: RankPool, tmp_path: Path) -> None:
    ranks(doctor, 1, tmp_path)


def doctor(rank: int, nproc: int, store: str, root: Path) -> None:
    import vllm.plugins
    import vllm_omni.plugins
    from vllm_omni.diffusion.models.magi2 import attention

    from vllm_musa_headpar import diagnosis

    def look(flag: str) -> tuple[Any, Any]:
        vllm.plugins.plugins_loaded = vllm_omni.plugins.omni_plugins_loaded = False
        with musa_platform(), environment(VLLM_MUSA_HEADPAR=flag), fresh_plugin():
            found = diagnosis.diagnose()
        return found, next(check for check in found.checks if check.name == "MAGI-2 on this platform")

    found, check = look("1")
    assert (found.active, found.host["platform"], found.host["runs_magi2"]) == (True, "musa", True)
    assert check.verdict == "information"
    assert "never run on a card" in check.seen
    assert "slow in attention" in check.seen

    found, check = look("0")
    assert (found.host["runs_magi2"], check.verdict) == (False, "warning")
    assert all(name in check.seen for name in RECORDS)

    drifted = Path(attention.__file__).read_text().replace("scale = q.shape[-1] ** -0.5", "scale = 1.0")
    with modified_magi2(root, {"attention.py": drifted}):
        found, check = look("1")
    assert (found.host["runs_magi2"], check.verdict) == (False, "warning")
    assert "cannot start: magi2.musa_attention" in check.seen
