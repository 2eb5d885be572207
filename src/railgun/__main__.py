"""`python -m railgun`: the command line.

Python puts the current directory first in `sys.path`, where a file of the user's may have the name of a module that
commands import. `railgun` itself, the program, does not have it there; so it is taken away. Commands that load a flow
add the directory of the flow (`cli.loading`).
"""

import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from railgun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
