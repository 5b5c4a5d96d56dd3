"""Looks up the peak FLOP/s of a device, for the model FLOPs utilisation (mfu)."""

from __future__ import annotations

import re

import torch

PEAK_TFLOPS: tuple[tuple[str, float, float | None], ...] = (
    # name of the device, dense 16-bit matrix FLOPs, fp32 without TF32; from the vendors' data sheets
    (r"\bB200\b", 2250, 75),
    (r"\bH200\b|\bGH200\b", 989, 67),
    (r"\bH100 PCIe\b", 756, 51),
    (r"\bH100 NVL\b", 835, 60),
    (r"\bH[18]00\b", 989, 67),
    (r"\bA[18]00\b", 312, 19.5),
    (r"\bL40S\b", 362, 91.6),
    (r"\bL4\b", 121, 30.3),
    (r"\bA10\b", 125, 31.2),
    (r"\bRTX 4090\b", 165, 82.6),
    (r"\bRTX 3090\b", 71, 35.6),
    (r"\bV100\b", 125, 15.7),
    (r"\bMI300X\b", 1307, 163),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device (`torch.cuda.get_device_name()`) in "bf16", "fp16", "fp32"; None if unknown."""
    for pattern, half, single in PEAK_TFLOPS:
        if re.search(pattern, device_name):
            tflops = {"bf16": half, "fp16": half, "fp32": single}.get(dtype)
            return tflops * 1e12 if tflops else None
    return None


def device_peak_flops(device: torch.device, dtype: str) -> float | None:
    """`peak_flops` of the device itself; None for a CPU."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
