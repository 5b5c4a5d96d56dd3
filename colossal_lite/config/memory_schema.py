"""Describes the placement of model state on device, host and disk: the schema of `memory`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from colossal_lite.config.schema import (
    Legal,
    NotNegative,
    Positive,
    Ratio,
    Section,
    SettingError,
    UnusedSetting,
)

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_bytes(value: Any) -> Any:
    """`"40GiB"` as a number of bytes. Any other value is returned unchanged."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", value) if isinstance(value, str) else None
    return round(float(match[1]) * UNITS[match[2]]) if match else value


UNDIVIDED = "without device_budget all model state rests on the device"
"""Why placement='auto' has no effect then."""
Budget = Annotated[
    int, Field(ge=1), BeforeValidator(parse_bytes), Legal("bytes as an int >= 1, or text such as '40GiB'")
]


class HostFraction(Section):
    """Shares of model state that are stored on the host under placement='static'."""

    weights: Ratio = 0.0
    """Share of the weights; needs zero.stage=3."""
    gradients: Ratio = 0.0
    """Share of the gradients. It needs gradients that are reduced by micro-batch and kept in shards (zero.stage 2 and
    3), or one rank."""
    optimizer: Ratio = 0.0
    """Share of the optimizer's states, and of masters that are separate from the weights."""


def _is_mix(value: Any) -> Any:
    """Checks a mix of updates on host and device: one of its two shares, or the numbers of chunks."""
    if isinstance(value, str):
        return value
    every, host = value.get("every", 2), value.get("host", 0)
    if len(value) != 1 or isinstance(every, tuple) or int(every) != every or every < 2:
        raise ValueError("is no share of the chunks")
    if isinstance(host, tuple):
        if len({*host}) != len(host) or any(number < 0 for number in host):
            raise ValueError("names a chunk twice, or none")
    elif not 0 <= host <= 1:
        raise ValueError("is no share of the chunks")
    return value


UpdateOn = Annotated[
    Literal["device", "host", "auto"] | dict[Literal["every", "host"], int | float | tuple[int, ...]],
    AfterValidator(_is_mix),
    Legal(
        "'device', 'host', 'auto', dict(every=an int >= 2), dict(host=a number >= 0 and <= 1), or dict(host=a list of "
        "chunk numbers)"
    ),
]


class RatesConfig(Section):
    """Rates of a machine for one rank. A device that a CPU emulates copies no faster than these say."""

    file: str | None = None
    """A file of `colossal-lite calibrate`, in the place of all others."""
    host_update: Positive | None = None
    """Elements a second that are updated on the host."""
    device_update: Positive | None = None
    """Elements a second that are updated on the device."""
    up: Budget | None = None
    """Bytes a second from host to device; None: as fast as the machine copies."""
    down: Budget | None = None
    """Bytes a second from device to host; None: as `up`."""
    latency_s: NotNegative = 0.0
    """Seconds of latency of each copy between device and host."""
    disk: Budget | None = None
    """Bytes a second from and to the disk together; None: as fast as it is."""
    host_memory: Budget | None = None
    """Bytes a second that the host reads and writes, for updates and copies together; None: no limit."""
    call_s: NotNegative = 0.0
    """Seconds of overhead for the host update of each chunk."""
    flops: Positive | None = None
    """Floating-point operations a second of forward and backward. `plan` predicts the seconds of a step by it, without
    a pipeline."""

    def errors(self) -> Iterable[SettingError]:
        if self.file is not None and len(self.model_fields_set) > 1:
            yield SettingError("file", "is given, and other rates are", "a file alone, or rates alone")


NEEDED = ("host_update", "device_update", "up")
"""The rates by which a mix is found."""


class MemoryConfig(Section):
    """Tiers of memory: device, host, disk."""

    placement: Literal["device", "host", "disk", "static", "auto"] = "device"
    """Tier that stores model state. device: all on the device. host, disk: optimizer state there. static: the shares of
    host_fraction on the host. auto: the device within device_budget, then the host. auto moves gradients and optimizer
    state, and weights at zero.stage=3. If disk_dir is set, optimizer state beyond host_budget is stored on disk."""
    host_fraction: HostFraction = HostFraction()
    """placement='static': shares stored on the host."""
    chunk_bytes: Budget | None = None
    """Bytes of a chunk, in the dtype of the masters. A chunk is reduced, gathered, copied and updated at once. A larger
    parameter is a chunk by itself. None: 8 MiB on CPUs, 64 MiB on CUDA."""
    device_budget: Budget | None = None
    """Bytes on each device, activations included; None: all of the device's memory."""
    host_budget: Budget | None = None
    """Bytes of host memory for each rank; None: no limit. State that a closed engine leaves in a store counts too."""
    disk_dir: str | None = None
    """Directory of the disk tier. placement='disk' needs it. 'host' and 'auto' write optimizer state beyond host_budget
    there; without it they never use the disk."""
    update_on: UpdateOn = "device"
    """Where the optimizer updates state that is stored on the host or on disk. device: the state is copied there and
    back; the bits are those of state that stays on the device. host: the CPU updates it, so gradients are copied down
    and weights up. dict(every=k): of every k chunks one on the device, the others on the host. dict(host=share): this
    share of the chunks on the host. dict(host=[0, 2]): the chunks with these numbers. Both sides then work at once.
    auto: the fastest mix by `rates`; the resolved configuration has that mix."""
    rates: RatesConfig = RatesConfig()
    """Rates of the machine, or the name of a file of `colossal-lite calibrate`. update_on='auto' without rates takes
    that file of this machine where there is one, and measures otherwise."""
    shared_base: str | None = None
    """A name for the frozen weights at zero.stage=3. Engines of one store that state it must have equal ones; others
    are refused. None: engines with equal frozen weights share them, and others do not."""

    @property
    def on_host(self) -> Fraction | tuple[int, ...]:
        """Share of the offloaded chunks that the host updates, or the numbers of these chunks."""
        if isinstance(self.update_on, str):
            return Fraction(self.update_on == "host")
        kind, value = next(iter(self.update_on.items()))
        if isinstance(value, tuple):
            return value
        return 1 - 1 / Fraction(value) if kind == "every" else Fraction(value).limit_denominator(10_000)

    @property
    def moves(self) -> bool:
        """Whether a plan made before the first update chooses the tier of each weight, gradient and optimizer
        record."""
        return self.placement == "static" or (self.placement == "auto" and self.device_budget is not None)

    def may_rest(self, kind: str) -> bool:
        """Whether any "weights" or "gradients" may be off the device after the first step."""
        return self.placement != "static" or dict(self.host_fraction)[kind] > 0

    @property
    def records_tier(self) -> str:
        """The tier of optimizer records before a plan moves them."""
        if self.moves:
            return "host"
        return "device" if self.placement == "auto" else self.placement

    @property
    def sends_gradients_early(self) -> bool:
        """Whether gradients for host updates are copied down in backward. All of them then need host memory at once, so
        this is off beside host_budget."""
        return self.host_budget is None

    @property
    def spills_to_disk(self) -> bool:
        """Whether records beyond the host budget are written to disk."""
        has_both = self.host_budget is not None and self.disk_dir is not None
        return has_both and self.placement in ("host", "auto") and self.records_tier == "host"

    def errors(self) -> Iterable[SettingError]:
        for name, what in (("disk_dir", "the name of a directory"), ("shared_base", "a name, or None")):
            if getattr(self, name) == "":
                yield SettingError(name, "is empty", what)
        if self.placement == "disk" and self.disk_dir is None:
            yield SettingError(
                "disk_dir", "placement='disk' needs it", "the name of a directory on a local disk"
            )
        if self.placement == "static" and not any(dict(self.host_fraction).values()):
            legal = "host_fraction=dict(weights=, gradients=, optimizer=) with one above 0, or 'device'"
            rule = "keeps nothing on the host, as each host_fraction is 0"
            yield SettingError("placement", rule, legal, reads="host_fraction")
        missing = [name for name in NEEDED if getattr(self.rates, name) is None]
        if self.update_on == "auto" and self.rates.file is None and 0 < len(missing) < len(NEEDED):
            legal = f"all of {', '.join(NEEDED)}, or none of them"
            yield SettingError(f"rates.{missing[0]}", "is not given, and others are", legal, reads="rates")

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.records_tier == "device":
            yield from self._unread_on_the_device()
        if not self.moves:
            yield UnusedSetting("shared_base", f"placement={self.placement!r} keeps weights on the device")
        if self.placement == "static" and not self.host_fraction.optimizer:
            why = "host_fraction.optimizer=0 keeps optimizer state on the device, and it is updated there"
            yield UnusedSetting("update_on", why)
        if self.placement != "static":
            for name in HostFraction.model_fields:
                yield UnusedSetting(
                    f"host_fraction.{name}", f"placement={self.placement!r} does not divide by fractions"
                )
        if self.records_tier != "disk" and not self.spills_to_disk:
            for name in ("disk_dir", "rates.disk"):
                yield UnusedSetting(name, self._why_not_on_disk)

    def _unread_on_the_device(self) -> Iterable[UnusedSetting]:
        """Settings without effect because all model state is on the device."""
        why = "placement='device' keeps all model state on the device"
        if self.placement == "auto":
            yield UnusedSetting("placement", why := UNDIVIDED)
        yield UnusedSetting("host_budget", f"{why} (a store alone takes it from there)")
        for name in RatesConfig.model_fields.keys() - {"disk", "flops"}:
            yield UnusedSetting(f"rates.{name}", "all model state rests on the device, and nothing moves")
        yield UnusedSetting("update_on", "all model state rests on the device, and is updated there")

    @property
    def _why_not_on_disk(self) -> str:
        if self.placement == "auto" and self.records_tier == "device":
            return UNDIVIDED
        if self.records_tier == "host" and self.placement != "static" and self.disk_dir is not None:
            return "without host_budget the host has room for all optimizer state, and none goes to disk"
        return f"placement={self.placement!r} does not use the disk"
