"""The runtime of one worker: stages at work, links to the other workers, and the process around them."""
