"""The entry point `python -m shared.cli`, where the console script is not installed."""

import sys

from shared.entry import main

sys.exit(main())
