"""One copy of a stream among others: see `copy.Copy` for the rules."""
