"""`python -m rl`, from the folder `benchmarks`."""

import sys

from rl.run import main

sys.exit(main())
