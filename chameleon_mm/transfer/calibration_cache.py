"""Cache of calibrations from one process to the next: a JSON file for each device and driver.

    CalibrationCache().store(calibrate(device))     # `chameleon-mm doctor` does
    CalibrationCache().load(device)                 # None: nothing was stored for this device, driver and versions

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
from chameleon_mm.transfer.calibrate import Calibration, installed_versions

_log = logging.getLogger(__name__)

SCHEMA = "chameleon_mm.calibration/2"

_NO_FOLDER = (OSError, RuntimeError)  # the disk refuses; the user has no home


class CalibrationCache:
    """Calibrations in the folder `path` (None: `~/.cache/chameleon_mm`), which the first `store` makes.

    Safe for several processes: a file is replaced whole. A simulated calibration is never kept: it is quick to have again.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path("~", ".cache", "chameleon_mm") if path is None else Path(path)

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


def read_record(file: Path, schema: str) -> dict[str, Any]:
    """Values in `file`. Raises `ValueError` where they are of another schema, and what reading raises."""
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if (found := values.pop("schema")) != schema:
        raise ValueError(f"expected schema {schema}, got {found}")
    return values


def write_record(file: Path, schema: str, values: Mapping[str, Any]) -> None:
    """Replace `file` whole, so that a reader never sees a half; its folder is made where there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False) as written:
        new = Path(written.name)
        try:
            written.write(json.dumps({"schema": schema, **values}, indent=2) + "\n")
            written.flush()
            new.replace(file)
        except OSError:
            new.unlink(missing_ok=True)
            raise


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
