"""`python -m chameleon_mm` is `chameleon-mm`."""

from __future__ import annotations

import sys

from chameleon_mm.tools.cli import main

sys.exit(main())
