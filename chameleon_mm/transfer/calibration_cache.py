"""Cache of calibrations from one process to the next: a JSON file for each device and driver.

    CalibrationCache().get(device)      # the cached one, else measured now and stored

What cannot be read, is another's or was measured with other versions is passed over with a line in the log, never an error.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chameleon_mm.device import Device
from chameleon_mm.transfer.calibrate import Calibration, calibrate, installed_versions
from chameleon_mm.transfer.route import Thresholds

_log = logging.getLogger(__name__)

SCHEMA = "chameleon_mm.calibration/1"

_NO_FOLDER = (OSError, RuntimeError)  # the disk refuses; the user has no home


class CalibrationCache:
    """Calibrations in the folder `path` (None: `~/.cache/chameleon_mm`), which the first `store` makes.

    Safe for several processes: a file is replaced whole. A simulated calibration is never kept: it is quick to have again.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path("~", ".cache", "chameleon_mm") if path is None else Path(path)

    def get(self, device: Device) -> Calibration:
        """The calibration that `load(device)` finds, or a new one, stored. Raises what `calibrate` raises."""
        calibration = self.load(device)
        if calibration is None:
            calibration = calibrate(device)
            self.store(calibration)
        return calibration

    def load(self, device: Device) -> Calibration | None:
        """Calibration of this device under this driver and with the versions installed now; None where there is none."""
        if device.simulated:
            return None
        file: Path | None = None
        try:
            file = self.file(device.name, device.driver)
            calibration = Calibration.from_dict(read_record(file, SCHEMA))
        except FileNotFoundError:
            return None
        except (*_NO_FOLDER, ValueError, TypeError, KeyError, AttributeError) as error:  # AttributeError: JSON, but no object
            _log.warning("chameleon_mm: the calibration in %s is passed over, as it cannot be read: %s", file, str(error))
            return None
        expected = (device.name, device.driver, installed_versions(), False)
        found = (calibration.device, calibration.driver, calibration.versions, calibration.simulated)
        if found != expected:
            _log.info("chameleon_mm: the calibration in %s is passed over: expected one of %s, got %s", file, expected, found)
            return None
        return calibration

    def store(self, calibration: Calibration) -> bool:
        """Store `calibration` for its device and driver. Returns whether it was stored: not if simulated, nor where the disk
        refuses, which is logged."""
        if calibration.simulated:
            return False
        try:
            write_record(self.file(calibration.device, calibration.driver), SCHEMA, calibration.to_dict())
        except _NO_FOLDER as error:
            _log.warning(
                "chameleon_mm: the calibration of %s cannot be kept in %s: %s", calibration.device, self.path, str(error)
            )
            return False
        return True

    def file(self, device: str, driver: str, *, kind: str = "calibration") -> Path:
        """Path of the file of that kind for that device and driver. Raises `RuntimeError` for a user without a home."""
        return self.path.expanduser() / f"{kind}-{_slug(device)}-{_slug(driver)}.json"


def thresholds_for(device: Device) -> Thresholds:
    """Thresholds that were measured of `device` on this machine and cached; where there are none, the built-in ones. Measures
    nothing: a machine is measured once, while it is idle, by `chameleon-mm doctor` or `CalibrationCache.get`."""
    cached = CalibrationCache().load(device)
    return Thresholds() if cached is None else cached.thresholds


def read_record(file: Path, schema: str) -> dict[str, Any]:
    """Values in `file`. Raises `ValueError` where they are of another schema, and what reading raises."""
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if (found := values.pop("schema")) != schema:
        raise ValueError(f"expected schema {schema}, got {found}")
    return values


def write_record(file: Path, schema: str, values: Mapping[str, Any]) -> None:
    """Write `values` to `file`, whose folder is made where there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _replace(file, json.dumps({"schema": schema, **values}, indent=2) + "\n")


def _replace(file: Path, text: str) -> None:
    """Replace the text of `file` at once: who reads it meanwhile reads the old one, whole."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False) as written:
        new = Path(written.name)
        try:
            written.write(text)
            written.flush()
            new.replace(file)
        except OSError:
            new.unlink(missing_ok=True)
            raise


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
