"""What travels between processes: columns of values, batches, frames, and the hello that opens a link."""
