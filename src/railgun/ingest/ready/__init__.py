"""Ready-made connectors: files that grow, tables of databases, webhooks."""
