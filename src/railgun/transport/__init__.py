"""Communication between processes: encoded columns and batches, frames, the opening handshake (hello), listeners."""
