"""What users write: flows of steps, sources and sinks; compiled to stages by `plan`."""
