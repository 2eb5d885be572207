"""The messaging node's server: accept clients, serve their sessions, and answer the HTTP API."""
