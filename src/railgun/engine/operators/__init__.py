"""What steps do with batches, one family of steps a file. An operator is a step's instance on one worker."""
