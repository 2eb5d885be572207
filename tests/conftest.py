"""What all tests have in common: the processes they start, hundreds of them, keep compiled modules, as with ./run."""

from __future__ import annotations

import os

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
