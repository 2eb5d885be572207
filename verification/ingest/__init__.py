"""Models and simulations that check streams which programs push."""
