"""`python -m suptickets`."""

import sys

from suptickets.cli import main

sys.exit(main())
