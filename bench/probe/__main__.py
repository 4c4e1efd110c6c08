"""`python3 -m chameleon_mm.bench.probe` runs the probe."""

from __future__ import annotations

import sys

from chameleon_mm.bench.probe.command import main

sys.exit(main())
