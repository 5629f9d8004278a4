"""``python -m ampwise_lint``."""

import sys

from ampwise_lint.main import main

sys.exit(main())
