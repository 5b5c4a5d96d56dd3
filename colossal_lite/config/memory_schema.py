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
    """`"40GiB"` as a number of bytes; anything that is no such text is returned as it came."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", value) if isinstance(value, str) else None
    return round(float(match[1]) * UNITS[match[2]]) if match else value


UNDIVIDED = "without device_budget all model state rests on the device"
"""Why placement='auto' has no effect then."""
Budget = Annotated[
    int, Field(ge=1), BeforeValidator(parse_bytes), Legal("bytes as an int >= 1, or text such as '40GiB'")
]


class HostFraction(Section):
    """Shares of model state that rest on the host under placement='static'."""

    weights: Ratio = 0.0
    """Of the weights, which can rest there at zero.stage=3."""
    gradients: Ratio = 0.0
    """Of the gradients, which can rest there where they are reduced by micro-batch and kept in shards (zero.stage 2 and
    3), or on one rank."""
    optimizer: Ratio = 0.0
    """Of the optimizer's states, the masters included where they are apart from the weights."""


def _is_mix(value: Any) -> Any:
    """A mix of updates on host and device: one of its two shares, in range, or the numbers of chunks."""
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
    """Rates of a machine for one rank, for update_on="auto": all of the first four, or none, and they are measured."""

    host_update: Positive | None = None
    """Elements a second that are updated on the host."""
    device_update: Positive | None = None
    """Elements a second that are updated on the device."""
    up: Budget | None = None
    """Bytes a second from host to device."""
    down: Budget | None = None
    """Bytes a second from device to host."""
    host_memory: Budget | None = None
    """Bytes a second that the host reads and writes, for updates and copies together; None: it does not limit them."""
    call_s: NotNegative = 0.0
    """Seconds that the update of a chunk costs on the host beside its elements."""

    def errors(self) -> Iterable[SettingError]:
        needed = ("host_update", "device_update", "up", "down")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing and self.model_fields_set:
            yield SettingError(
                missing[0], "is not given, and other rates are", f"all of {', '.join(needed)}, or none"
            )


class MemoryConfig(Section):
    """Tiers of memory: device, host, disk."""

    placement: Literal["device", "host", "disk", "static", "auto"] = "device"
    """Where model state rests: all on the device; optimizer state on the host, or on disk; static: shares of it on the
    host (host_fraction); auto: on the device what device_budget allows, weights (at zero.stage=3), gradients and
    optimizer state on the host where it does not. Of optimizer state that host and auto keep off the device, what
    host_budget does not allow rests on disk, if there is a disk_dir."""
    host_fraction: HostFraction = HostFraction()
    """placement='static': what rests on the host."""
    device_budget: Budget | None = None
    """Bytes on each device, activations included; None: what the device has."""
    host_budget: Budget | None = None
    """Bytes of host memory for each rank; None: no limit. What an engine leaves in a store when it is closed is among
    them."""
    disk_dir: str | None = None
    """Directory of the disk tier: for placement='disk', and for what 'host' and 'auto' keep off the device beyond
    host_budget; without that nothing of theirs goes to disk."""
    link_bandwidth: Budget | None = None
    """Bytes a second each way between device and host, emulated on a CPU; None: as fast as it copies."""
    update_on: UpdateOn = "device"
    """Where optimizer state that rests on the host or on disk is updated. device: it is copied there and back, and the
    device's op gives the bits that it gives to state that stays there. host: with the CPU's op, and gradients go down
    and weights up in its place. dict(every=k): of every k chunks one on the device, and the others on the host;
    dict(host=share): so many on the host; dict(host=[0, 2]): the chunks with these numbers. Both sides then work at
    once. auto: the mix that is fastest by `rates`, which takes the place of "auto" in the resolved configuration."""
    rates: RatesConfig = RatesConfig()
    """What the machine does in a second, for update_on="auto"."""
    link_latency_s: NotNegative = 0.0
    """Seconds before the bytes of each copy between device and host, emulated on a CPU."""
    disk_bandwidth: Budget | None = None
    """Bytes a second from and to the disk together, emulated on a CPU; None: as fast as the disk is."""

    @property
    def on_host(self) -> Fraction | tuple[int, ...]:
        """Of the chunks whose records rest off the device: the share that is updated on the host, or the numbers of
        those that are."""
        if isinstance(self.update_on, str):
            return Fraction(self.update_on == "host")
        kind, value = next(iter(self.update_on.items()))
        if isinstance(value, tuple):
            return value
        return 1 - 1 / Fraction(value) if kind == "every" else Fraction(value).limit_denominator(10_000)

    @property
    def emulates(self) -> tuple[str, ...]:
        """The settings of links that are only emulated, as they are given."""
        given = ("link_bandwidth", "link_latency_s", "disk_bandwidth")
        return tuple(name for name in given if getattr(self, name))

    @property
    def moves(self) -> bool:
        """Whether each weight, gradient and optimizer record rests on the device or on the host as a plan says that is
        made before the first update."""
        return self.placement == "static" or (self.placement == "auto" and self.device_budget is not None)

    @property
    def records_tier(self) -> str:
        """Where optimizer records rest at first, if nothing else speaks against it."""
        if self.moves:
            return "host"
        return "device" if self.placement == "auto" else self.placement

    @property
    def spills_to_disk(self) -> bool:
        """Whether records for which the host has no room rest on disk."""
        has_both = self.host_budget is not None and self.disk_dir is not None
        return has_both and self.placement in ("host", "auto") and self.records_tier == "host"

    def errors(self) -> Iterable[SettingError]:
        if self.placement == "disk" and self.disk_dir is None:
            yield SettingError(
                "disk_dir", "placement='disk' needs it", "the name of a directory on a local disk"
            )
        if self.placement == "static" and not any(dict(self.host_fraction).values()):
            legal = "host_fraction=dict(weights=, gradients=, optimizer=) with one above 0, or 'device'"
            rule = "keeps nothing on the host, as each host_fraction is 0"
            yield SettingError("placement", rule, legal, reads="host_fraction")

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.records_tier == "device":
            yield from self._unread_on_the_device()
        if self.update_on != "auto":
            for name in RatesConfig.model_fields:
                yield UnusedSetting(f"rates.{name}", f"update_on={self.update_on!r} asks for no rates")
        if self.placement == "static" and not self.host_fraction.optimizer:
            why = "host_fraction.optimizer=0 keeps optimizer state on the device, and it is updated there"
            yield UnusedSetting("update_on", why)
        if self.placement != "static":
            for name in HostFraction.model_fields:
                yield UnusedSetting(
                    f"host_fraction.{name}", f"placement={self.placement!r} does not divide by fractions"
                )
        if self.records_tier != "disk" and not self.spills_to_disk:
            for name in ("disk_dir", "disk_bandwidth"):
                yield UnusedSetting(name, self._why_not_on_disk)

    def _unread_on_the_device(self) -> Iterable[UnusedSetting]:
        """Where no optimizer record rests elsewhere, nor anything else."""
        why = "placement='device' keeps all model state on the device"
        if self.placement == "auto":
            yield UnusedSetting("placement", why := UNDIVIDED)
        yield UnusedSetting("host_budget", f"{why} (a store alone takes it from there)")
        for name in ("link_bandwidth", "link_latency_s"):
            yield UnusedSetting(name, "all model state rests on the device, and nothing moves")
        yield UnusedSetting("update_on", "all model state rests on the device, and is updated there")

    @property
    def _why_not_on_disk(self) -> str:
        if self.placement == "auto" and self.records_tier == "device":
            return UNDIVIDED
        if self.records_tier == "host" and self.placement != "static" and self.disk_dir is not None:
            return "without host_budget the host has room for all optimizer state, and none goes to disk"
        return f"placement={self.placement!r} does not use the disk"
