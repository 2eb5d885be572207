"""`python -m railgun`: the command line."""

import sys

from railgun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
