"""Prove the rules of producers and transactions."""
