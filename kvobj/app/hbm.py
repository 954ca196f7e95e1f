"""The hbm tier of a node: opened where the configuration asks for one, or the node does not start."""

from __future__ import annotations

import asyncio
import logging

from kvobj.arena import Arena
from kvobj.config.settings import HbmSettings
from kvobj.errors import ConfigurationError, DeviceError, StoreFullError
from kvobj.gpu.codec_copies import DeviceCodecs
from kvobj.gpu.copies import Copies
from kvobj.gpu.cuda_device import CudaDevice, unavailable
from kvobj.gpu.device import Device
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.pool import DevicePool
from kvobj.gpu.registered import RegisteredMemory
from kvobj.metrics import Metrics
from kvobj.policy import LruPolicy
from kvobj.tiers.hbm import CodingOf, HbmTier


async def open_hbm(
    settings: HbmSettings, arena: Arena, *, coding_of: CodingOf, metrics: Metrics, log: logging.Logger
) -> HbmTier:
    """Open the device and take all of the tier's memory at once: later an engine would have it. `ConfigurationError` that says
    what is missing."""
    try:
        device, pool = await asyncio.to_thread(_open_pool, settings)
    except (DeviceError, StoreFullError) as error:
        raise ConfigurationError([f"tiers: hbm: {error}"]) from error
    return HbmTier(
        arena,
        device,
        pool,
        copies=Copies(device),
        registered=RegisteredMemory(device, log=log),
        codecs=DeviceCodecs(device),
        policy=LruPolicy(),
        coding_of=coding_of,
        metrics=metrics,
    )


async def check_hbm(settings: HbmSettings | None) -> None:
    """`ConfigurationError` that says what is missing for an hbm tier: asked before anything else is opened."""
    if settings is not None and settings.memory == "device":
        reason = await asyncio.to_thread(unavailable, settings.device)
        if reason is not None:
            raise ConfigurationError([f"tiers: hbm: {reason}"])


def _open_pool(settings: HbmSettings) -> tuple[Device, DevicePool]:
    device: Device
    if settings.memory == "host":
        device = HostDevice(settings.capacity_bytes)
    else:
        device = CudaDevice(settings.device, max_sms=settings.max_sms)
    pool = DevicePool(device, capacity_bytes=settings.capacity_bytes)
    try:
        pool.fill()
    except StoreFullError:
        pool.close()
        device.close()
        raise
    return device, pool
