<<<<<<< HEAD
"""The runtime of one worker: stages at work, links to the other workers, and the process around them."""
=======
"""The runtime of one worker: one Python process in one Spark task."""
>>>>>>> fd8d6d6f2b4b8cc185916484a3b48c3328505b0c
