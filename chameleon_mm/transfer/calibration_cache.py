"""What was measured of a device, kept from one process to the next: a JSON file for each kind, device and driver.

    keep(device, "link", {"h2d_gbps": 55.4})     # `chameleon-mm doctor` does; False where it cannot be written
    kept(device, "link")                         # None: nothing was kept for this device, driver and torch

A simulated device has no file: it is quick to measure again. What cannot be read is passed over with a line in the log.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from chameleon_mm.device import Device

_log = logging.getLogger(__name__)

FOLDER = Path("~", ".cache", "chameleon_mm")


def kept(device: Device, kind: str) -> dict[str, Any] | None:
    """Values of this kind for this device under this driver and this torch; None where there are none."""
    if device.simulated:
        return None
    try:
        record = json.loads(cache_file(device, kind).read_text(encoding="utf-8"))
        return dict(record["values"]) if record["about"] == _about(device) else None
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:  # RuntimeError: the user has no home
        _log.warning("chameleon_mm: %s of %s in %s is passed over, as it cannot be read: %s", kind, device.name, FOLDER, error)
        return None


def keep(device: Device, kind: str, values: Mapping[str, Any]) -> bool:
    """Keep `values`, which JSON can hold. Returns False for a simulated device, and where the disk refuses, which is logged."""
    if device.simulated:
        return False
    try:
        file = cache_file(device, kind)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # replaced whole: another process never reads a half
        try:
            new.write_text(json.dumps({"about": _about(device), "values": values}, indent=2) + "\n", encoding="utf-8")
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        _log.info("chameleon_mm: %s of %s cannot be kept in %s: %s", kind, device.name, FOLDER, error)
        return False
    return True


def cache_file(device: Device, kind: str) -> Path:
    """Path of the file of that kind for that device and its driver. Raises `RuntimeError` for a user without a home."""
    name, driver = (re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") for text in (device.name, device.driver))
    return FOLDER.expanduser() / f"{kind}-{name}-{driver}.json"


def _about(device: Device) -> dict[str, str]:
    """What the values depend on."""
    return {"device": device.name, "driver": device.driver, "torch": str(torch.__version__)}
