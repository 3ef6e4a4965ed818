"""``python -m latentscan``: the command."""

from __future__ import annotations

import sys

from latentscan.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
