"""Ready-made connectors: growing files, database tables, and webhooks."""
