"""Process batches: one family of steps a file. An operator is the instance of a step on one worker."""
