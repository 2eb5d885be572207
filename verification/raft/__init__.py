"""Models and simulations that check Raft."""
