"""Run one worker: its stages, its links to other workers, and its process."""
