"""``python -m ampwise``."""

import sys

from ampwise.cli.main import main

sys.exit(main())
