"""Define flows: steps, sources and sinks, as users write them, and their compilation to stages (`plan`)."""
