"""`python -m rl_grpo`, from the folder `examples`."""

import sys

from rl_grpo.run import main

sys.exit(main())
